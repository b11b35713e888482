"""Plain absmax rounding, the reference that every other method has to beat.

    s = max|w| / qmax in each group,   w' = s clamp(round(w / s), -qmax, qmax),   qmax = 2^(bits-1) - 1 (ternary: 1)

One scale in float32, no clip, no zero point. It knows nothing of the package, so that a fault there cannot hide here.
"""

import torch
from torch import Tensor


def absmax(weight: Tensor, bits: str | int, group_size: int | None) -> Tensor:
    """`weight` [N, K] rounded to the grid and back, in its own dtype. The last group of a row may be shorter."""
    largest_code = 1 if bits == "ternary" else 2 ** (bits - 1) - 1
    rounded = []
    for group in weight.float().split(group_size or weight.shape[1], dim=1):
        scale = (group.abs().amax(1, keepdim=True) / largest_code).clamp_min(1e-12)
        rounded.append(scale * (group / scale).round().clamp(-largest_code, largest_code))
    return torch.cat(rounded, dim=1).to(weight.dtype)


@torch.no_grad()
def apply(model, names: list[str], bits: str | int, group_size: int | None) -> None:
    """Round the weights of the named modules of a dense model in place."""
    for name in names:
        weight = model.get_submodule(name).weight
        weight.copy_(absmax(weight, bits, group_size))
