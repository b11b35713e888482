"""Looking up rows of a low-bit table: y[i] = s * (q[id_i] - z), only the rows that are asked for.

The table is stored exactly as a linear layer of V = num_embeddings rows and K = embedding_dim columns, so one table
can serve as input embedding and tied output layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import rows_of


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
    `dtype`. An id outside the table raises IndexError, as torch does."""
    table = weight.view(weight.shape[-2], weight.shape[-1])
    rows = rows_of(table, scale, zero_point, ids.reshape(-1), bits, embedding_dim, group_size, dtype)
    return rows.view(*ids.shape, embedding_dim)
