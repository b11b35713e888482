"""The ternary form of finer codes, for a forward pass that is coarser than what is stored.

    mu = mean over the group of |q|,    t = clamp(round(q / mu), -1, 1),    gamma = s * mu

which is the absmean rule of BitNet b1.58 (Ma et al. 2024, eq. 1-3) applied to w = s q: the scale cancels in t. Stored
codes of 8 bits with this forward are the ternary-inference mode of Direct Quantized Training (Zhao et al. 2024): small
steps add up in the codes although the forward pass sees three values. Gradients pass through the rounding unchanged
(straight-through).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .grid import expand_groups, group_count
from .rounding import NO_FRACTION


class Ternary(NamedTuple):
    """Codes int8 [N, K] in {-1, 0, 1}; scale as the stored one; mu float32 of the scale's shape."""

    codes: Tensor
    scale: Tensor
    mu: Tensor


def ternary(codes: Tensor, scale: Tensor, group_size: int | None) -> Ternary:
    """Ternary form of codes int8 [N, K] whose scale is [N, G], [N, 1] or [1, 1]. A group of zeros keeps its scale."""
    values = codes.to(torch.float32)
    mu = _mean_magnitude(values, scale.shape, group_size)
    mu = torch.where(mu > 0, mu, 1.0)
    t = values / expand_groups(mu, codes.shape[-1], group_size)
    # rounds to nearest, ties to even, without waking torch's threads
    t = t.clamp_(-1.0, 1.0).add_(NO_FRACTION).sub_(NO_FRACTION)
    return Ternary(t.to(torch.int8), (scale.to(torch.float32) * mu).to(scale.dtype), mu)


def sum_groups(values: Tensor, shape: torch.Size, group_size: int | None) -> Tensor:
    """Sums of values float32 [N, K] over what shares a scale of `shape` [N, G], [N, 1] or [1, 1]."""
    if shape[0] == 1 and values.shape[0] != 1:
        return values.sum().reshape(1, 1)
    if group_size is None or shape[1] == 1:
        return values.sum(dim=1, keepdim=True)
    padded = F.pad(values, (0, -values.shape[1] % group_size))
    return padded.unflatten(1, (shape[1], group_size)).sum(dim=2)


def _mean_magnitude(values: Tensor, shape: torch.Size, group_size: int | None) -> Tensor:
    rows, columns = values.shape
    total = sum_groups(values.abs(), shape, group_size)
    if shape[0] == 1 and rows != 1:
        return total / max(values.numel(), 1)
    groups = group_count(columns, group_size)
    if shape[1] == 1:
        return total / max(columns, 1)
    count = torch.full((groups,), float(group_size), device=values.device)
    count[-1] -= -columns % group_size
    return total / count
