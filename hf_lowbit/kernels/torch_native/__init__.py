"""The tier that needs torch alone: no compiler, no extension, on any machine where torch runs.

Four ways to the same product y = x W^T, W[n, k] = s[n, g] (q[n, k] - z[n, g]); shape and dtype decide:

- few rows, bfloat16: torch's own int4 product, which reads 4 bits a weight (`int4.py`);
- few rows, bfloat16, 8 bits symmetric without groups: torch's int8 product, on the stored codes;
- other dtypes, up to 32 rows, 8 bits without groups: x in fixed point, integer products of the codes (`integers.py`);
- everything else: W dequantized in blocks that stay in cache, each multiplied at once (`blocks.py`).

int8 activations without groups are the integer way with one digit, equal to the reference. With groups their codes are
multiplied as floats: each product is exact, sums are float32 and rounded to x's dtype before the token's scale.
Without VNNI the integer ways are left out, without AVX2 torch's own products too: torch runs both one weight at a time
there.

Memory: what this tier keeps besides the weights is written in `copies.py`.

The numbers of rows below come from one thread of an AVX512 machine (AMD Zen 5, no AMX) that did other work too,
weights in a ring larger than its cache. Against torch's dense bfloat16 product, layers of 2048 x 2048 and more run at
4 times its speed with one row at 4 bits and 2 times at 8 bits, at about par with 16 rows (half at 8 bits in groups),
and at half to nine tenths from 32 to 512: there dequantizing costs as much as multiplying.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ...functional.dispatch import Kernel, Problem, register_kernel
from ...functional.linear import quantize_activations
from .blocks import Layer, block_linear, finish, row_factors
from .int4 import HAS_INT4, int4_linear
from .integers import HAS_INTEGERS, LONGEST_ROW, fixed_point_linear, integer_linear


# above the portable C code, below the C code for vector units
RANK = 100
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# rows of x up to which each way beats the next one; the int4 product of 8 bits works twice
INT4_ROWS, INT4_ROWS_UNGROUPED, INT4_ROWS_8BIT = 48, 40, 16
INT8_ROWS = 32
FIXED_POINT_ROWS = 32


def register() -> None:
    """Offer this tier to `choose`."""
    register_kernel(Kernel("torch-native", RANK, refuse, run))


def refuse(problem: Problem) -> str | None:
    """None, or why this tier does not take the problem."""
    if problem.device not in ("cpu", "cuda"):
        return f"it runs on cpu and cuda, not on {problem.device}"
    if problem.dtype not in DTYPES:
        return f"it computes in bfloat16, float16 and float32, not in {str(problem.dtype).removeprefix('torch.')}"
    if sys.byteorder != "little":
        return "it reads several bytes at once, in little-endian order"
    if problem.int8_activations and problem.in_features > LONGEST_ROW:
        return f"sums of {problem.in_features} int8 products can overflow; it takes up to {LONGEST_ROW}"
    return None


def run(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, problem: Problem
) -> Tensor:
    """y [M, N] in x's dtype, as `Kernel.run` asks."""
    layer = Layer(weight, scale, zero_point, problem)
    if not problem.int8_activations:
        return _float_linear(x, layer, bias)
    a, token_scale = quantize_activations(x)
    if _takes_integers(problem):
        y = integer_linear(a.unsqueeze(0), layer).mul_(row_factors(scale))
    else:
        # codes up to 127 are exact in bfloat16; float16 would overflow
        dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        y = _float_linear(a.to(dtype), layer, None).to(torch.float32)
    y = y * token_scale
    return (y if bias is None else y.add_(bias)).to(x.dtype).contiguous()


def _float_linear(x: Tensor, layer: Layer, bias: Tensor | None) -> Tensor:
    problem = layer.problem
    if problem.device == "cpu" and problem.rows and problem.in_features and problem.out_features:
        y = _packed_linear(x, layer, bias) if x.dtype == torch.bfloat16 and HAS_INT4 else None
        if y is not None:
            return y
        if problem.bits == 8 and problem.rows <= FIXED_POINT_ROWS and _takes_integers(problem):
            y = fixed_point_linear(x, layer)
            if y is not None:
                return finish(y, layer.scale, bias, x.dtype)
    return block_linear(x, layer, bias)


def _packed_linear(x: Tensor, layer: Layer, bias: Tensor | None) -> Tensor | None:
    """torch's int8 or int4 product, or None where they don't apply or don't pay."""
    problem, rows = layer.problem, layer.problem.rows
    eight, grouped = problem.bits == 8, problem.group_size
    if eight and not grouped and layer.zero_point is None:
        # torch's int8 product reads past the end of rows of other widths
        if rows > INT8_ROWS or problem.in_features % 32:
            return None
        y = torch._weight_int8pack_mm(x.contiguous(), layer.weight, x.new_ones(problem.out_features))
        return finish(y, layer.scale, bias, x.dtype)
    if rows > (INT4_ROWS_8BIT if eight else INT4_ROWS if grouped else INT4_ROWS_UNGROUPED):
        return None
    return int4_linear(x, layer, bias)


def _takes_integers(problem: Problem) -> bool:
    return (
        HAS_INTEGERS
        and problem.device == "cpu"
        and not problem.group_size
        and problem.rows > 0
        and problem.out_features > 0
        # of rows of one entry torch's integer product returns uninitialized memory (2.13)
        and 1 < problem.in_features <= LONGEST_ROW
    )


register()
