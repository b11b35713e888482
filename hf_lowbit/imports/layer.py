"""One foreign layer on our grids: codes, scales and zero points as they are, in the narrowest form that holds them.

    foreign   w = s (u - v),   u, v in 0 .. 2^b - 1
    ours      q = u - 2^(b-1),  z = v - 2^(b-1):   the same s, the same differences, so the same numbers

A grid is symmetric where every v is 2^(b-1). Widths that we lack (5, 6 and 7 bits) are stored in 8. Scales of groups
are bfloat16 where that holds all of them, else float32, which holds every float16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..configs.scheme import Scheme
from ..functional.grid import expand_groups, grid_of, group_count
from ..functional.packing import pack
from ..functional.rounding import ZERO_GROUP_SCALE


# foreign bits -> ours
WIDTHS = {2: 2, 3: 3, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}


@dataclass
class Layer:
    """A foreign layer as it was read. `codes` int8 [N, K] and `zero_point` int8 [N, G] are signed (u - 2^(b-1));
    `scale` [N, G] floats; `group_size` None is one scale a row."""

    name: str
    bits: int
    group_size: int | None
    codes: Tensor
    scale: Tensor
    zero_point: Tensor


def adopt(layer: Layer) -> tuple[Scheme, dict[str, Tensor]]:
    """Our scheme and the stored tensors by suffix ("", "_scale", "_zero_point"). Raises ValueError for scales that are
    negative or no numbers."""
    bits, in_features = WIDTHS[layer.bits], layer.codes.shape[1]
    grid, scale, codes = grid_of(bits), layer.scale.to(torch.float32), layer.codes
    if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
        raise ValueError(f"`{layer.name}` has a scale that is negative or not a number: the checkpoint is damaged.")
    if bool((scale == 0).any()):
        # all numbers of such a group are zero, and stay so with codes at the zero point
        empty = expand_groups(scale, in_features, layer.group_size) == 0
        codes = torch.where(empty, expand_groups(layer.zero_point, in_features, layer.group_size), codes)
        scale = torch.where(scale == 0, ZERO_GROUP_SCALE, scale)
    symmetric = not bool(layer.zero_point.any())
    scales = None
    if layer.group_size is not None:
        narrow = scale.to(torch.bfloat16)
        scales = None if torch.equal(narrow.to(torch.float32), scale) else "float32"
        scale = narrow if scales is None else scale
    stored = {"": pack(codes, grid).unsqueeze(0), "_scale": scale.contiguous()}
    if not symmetric:
        stored["_zero_point"] = layer.zero_point.contiguous()
    return Scheme(bits, layer.group_size, symmetric, "float", scales), stored


def check_scales(name: str, scale: Tensor, rows: int, in_features: int, group_size: int | None) -> None:
    """Raise ValueError unless `scale` is [rows, G]."""
    expected = (rows, group_count(in_features, group_size))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"`{name}` has scales of shape {tuple(scale.shape)}, but {rows} x {in_features} weights in groups of "
            f"{group_size} need {expected}: config and weights do not belong together."
        )


def whole_group(group_size: int | None, in_features: int) -> int | None:
    """None where one group covers the row."""
    return None if group_size is None or group_size < 0 or group_size >= in_features else group_size
