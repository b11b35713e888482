"""Low-bit live blocks: V[b, i, j] = s[b, i] q[b, i, j], one scale for each row of each block.

`values` are live blocks [..., bn, bk] of any leading shape (`blocks.py`), q signed codes of a symmetric grid, packed
row by row as everywhere (`packing.py`): int8 [..., bn, R]. Scales are bfloat16 [..., bn], since there are many: they
add 16 / bk bits to each weight. A row of a block is the group, so balanced and unbalanced masks store the same, and a
block can be read without its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grid import dequantize, grid_of
from .packing import pack, row_bytes, unpack
from .rounding import round_to_nearest


SCALE_DTYPE = torch.bfloat16


def stored_width(width: int, bits: str | int) -> int:
    """R, the bytes of one row of a block that is `width` wide."""
    return row_bytes(width, grid_of(bits))


def quantize_blocks(values: Tensor, bits: str | int) -> tuple[Tensor, Tensor]:
    """Nearest codes, packed int8 [..., bn, R], scales bfloat16 [..., bn]. Raises ValueError for NaN or infinity."""
    grid, (*lead, width) = grid_of(bits), values.shape
    # one group a row, with the many scales' dtype
    codes, scale, _ = round_to_nearest(values.reshape(-1, width), grid, width, symmetric=True)
    return pack(codes, grid).view(*lead, -1), scale.to(SCALE_DTYPE).view(lead)


def dequantize_blocks(
    stored: Tensor, scale: Tensor, bits: str | int, width: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The numbers [..., bn, bk] of packed codes, formed in float32 and rounded once to `dtype`."""
    return dequantize(unpack(stored, grid_of(bits), width), scale.unsqueeze(-1), dtype=dtype)
