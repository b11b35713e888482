"""Which values a weight may take: the grids, and how codes become numbers.

    w[n, k] = s[n, g] * (q[n, k] - z[n, g]),     g = k // group_size

`q` are signed integer codes in [qmin, qmax], `s` > 0 is the scale, `z` an integer zero point in the same range (absent
on symmetric grids, where it is 0). This is the usual affine grid (Jacob et al. 2018, eq. 1) with codes stored signed,
so that zero is always on the grid. Ternary is {-1, 0, 1} (BitNet b1.58, Ma et al. 2024, eq. 1-3).

Shape legend: N out_features, K in_features, G = ceil(K / group_size) groups a row, the last one shorter when
group_size does not divide K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


TERNARY = "ternary"
BITS = (TERNARY, 2, 3, 4, 8)


@dataclass(frozen=True)
class Grid:
    """One set of integer codes: its name, the bits of a stored field, and the smallest and largest code."""

    bits: str | int
    field_bits: int
    qmin: int
    qmax: int

    @property
    def levels(self) -> int:
        """Number of steps between the smallest and the largest code."""
        return self.qmax - self.qmin


_GRIDS = {bits: Grid(bits, bits, -(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in BITS if bits != TERNARY}
_GRIDS[TERNARY] = Grid(TERNARY, 2, -1, 1)


def grid_of(bits: str | int) -> Grid:
    """The grid for `bits` ("ternary", 2, 3, 4 or 8). Raises ValueError for anything else."""
    if isinstance(bits, bool) or bits not in _GRIDS:
        raise ValueError(f'`bits`={bits!r} is no grid; use "ternary", 2, 3, 4 or 8.')
    return _GRIDS[bits]


def group_count(in_features: int, group_size: int | None) -> int:
    """Scales a row of `in_features` weights needs: 1 without groups, else ceil(in_features / group_size)."""
    return 1 if group_size is None else -(-in_features // group_size)


def expand_groups(per_group: Tensor, in_features: int, group_size: int | None) -> Tensor:
    """Spread one value a group over the weights of the group: [..., N, G] -> [..., N, K] (or broadcastable to it)."""
    if group_size is None or per_group.shape[-1] == 1:
        return per_group
    return per_group.repeat_interleave(group_size, dim=-1)[..., :in_features]


def dequantize(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    group_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Numbers of the codes: s * (q - z), multiplied in float32 and rounded once to `dtype`.

    `codes` int8 [..., N, K]; `scale` and `zero_point` [..., N, G], [..., N, 1] or [..., 1, 1]. Returns [..., N, K].
    """
    in_features = codes.shape[-1]
    values = codes.to(torch.float32)
    if zero_point is not None:
        values -= expand_groups(zero_point, in_features, group_size).to(torch.float32)
    values *= expand_groups(scale.to(torch.float32), in_features, group_size)
    return values.to(dtype)
