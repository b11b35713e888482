"""Looking up rows of a low-bit table: y[i] = s * (q[id_i] - z), only the rows that are asked for.

The table is stored exactly as a linear layer of V = num_embeddings rows and K = embedding_dim columns, so one table
can serve as input embedding and tied output layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grid import dequantize, grid_of
from .packing import unpack


def embedding(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bits: str | int,
    embedding_dim: int,
    group_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Rows `ids` (integers, any shape) of packed `weight` int8 [1, V, R]; returns [*ids.shape, embedding_dim] in
    `dtype`."""
    flat = ids.reshape(-1)
    codes = unpack(weight.view(weight.shape[-2], weight.shape[-1]).index_select(0, flat), grid_of(bits), embedding_dim)
    if scale.shape[0] > 1:
        scale = scale.index_select(0, flat)
        zero_point = None if zero_point is None else zero_point.index_select(0, flat)
    return dequantize(codes, scale, zero_point, group_size, dtype).view(*ids.shape, embedding_dim)
