"""The weight dequantized once and kept: as fast as a dense layer, at the memory of a dense layer.

    y = x W^T + bias,    W[n, k] = s[n, g] (q[n, k] - z[n, g]) in float32, rounded once to x's dtype

which is the definition of the product. In bfloat16 the copy lies in the blocked order of torch's matrix library, which
`F.linear` makes anew at each call: that alone is worth a third at up to a hundred rows.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import Layer, dense_blocks
from .copies import copy_of


# rows that the order is made for; the order hardly depends on them
ORDER_ROWS = 64
HAS_ORDER = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def dense_linear(x: Tensor, layer: Layer, bias: Tensor | None) -> Tensor | None:
    """y = x W^T + bias [M, N] in x's dtype, or None where there is no room for the copy."""
    problem, dtype = layer.problem, x.dtype
    weights = problem.out_features * problem.in_features
    dense = copy_of(layer, _MAKE[dtype], weights * dtype.itemsize)
    if dense is None:
        return None
    if dense.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), dense, bias, "none", [], "")
    return F.linear(x, dense, bias)


def _make_dense(layer: Layer, dtype: torch.dtype) -> Tensor:
    problem = layer.problem
    dense = torch.empty(problem.out_features, problem.in_features, dtype=dtype)
    for part, block in dense_blocks(layer, dtype):
        dense[part] = block
    if dtype == torch.bfloat16 and HAS_ORDER:
        return torch.ops.mkldnn._reorder_linear_weight(dense, ORDER_ROWS)
    return dense


# one function a dtype: each stands for a copy of its own
_MAKE = {dtype: partial(_make_dense, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}
