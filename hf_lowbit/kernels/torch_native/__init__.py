"""The tier that needs torch alone: no compiler, no extension, on any machine where torch runs.

Several ways to the same product y = x W^T, W[n, k] = s[n, g] (q[n, k] - z[n, g]); shape and dtype decide:

- bfloat16, few rows: torch's own int4 product, which reads 4 bits a weight (`int4.py`);
- bfloat16, 8 bits symmetric without groups, few rows: torch's int8 product, on the stored codes;
- other dtypes, up to 32 rows, 8 bits without groups: x in fixed point, integer products of the codes (`integers.py`);
- bfloat16, more rows: a dense copy of W (`dense.py`);
- everything else, and where there is no room for a copy: W dequantized in blocks that stay in cache, each multiplied
  at once (`blocks.py`).

int8 activations without groups are integer products, equal to the reference. With groups the numbers t a that the
codes a stand for are multiplied, as any x: in bfloat16 they are rounded once more. Without VNNI the integer ways are
left out, without AVX2 torch's own products too: torch runs both one weight at a time there.

Memory: the copies that this tier keeps besides the weights are listed in `copies.py`. They are what makes it fast.

The numbers of rows below come from one thread of an AVX512 machine with AMX (Intel Granite Rapids), weights in a ring
larger than its cache; those of layers without a copy, and of machines without AMX, from AMD Zen 5.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ...functional.dispatch import Kernel, Problem, register_kernel
from .activations import quantize_tokens, round_tokens
from .blocks import Layer, block_linear, finish, row_factors
from .copies import REPACK_VARIABLE, repack_limit
from .dense import dense_linear
from .int4 import HAS_INT4, int4_linear
from .integers import HAS_INTEGERS, LONGEST_ROW, fixed_point_linear, int8_linear, integer_linear, takes_order


# above the portable C code, below the C code for vector units
RANK = 100
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HAS_MATRIX_UNITS = bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
# rows of x up to which each way beats a dense copy; the int4 product of 8 bits works twice
INT4_ROWS, INT4_ROWS_8BIT, INT8_ROWS = (4, 2, 4) if HAS_MATRIX_UNITS else (16, 8, 16)
# the same against dequantizing at every call, for layers without a copy
INT4_ROWS_ALONE, INT4_ROWS_UNGROUPED_ALONE, INT4_ROWS_8BIT_ALONE, INT8_ROWS_ALONE = 48, 40, 16, 32
FIXED_POINT_ROWS = 32


def register() -> None:
    """Offer this tier to `choose`."""
    register_kernel(Kernel("torch-native", RANK, refuse, run, remark, takes_stored=True))


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


def remark(problem: Problem) -> str | None:
    """What speed costs in memory, for the report; None where nothing is kept."""
    if problem.device != "cpu" or repack_limit() == 0:
        return None
    if problem.int8_activations and _takes_integers(problem):
        kept = None if problem.bits == 8 and not takes_order(problem) else "8 bits a weight"
    elif problem.dtype != torch.bfloat16:
        kept = None
    else:
        few = problem.bits != 8 or problem.group_size or problem.asymmetric
        kept = "16 bits a weight for prompts" + (f" and {8 if problem.bits == 8 else 4} for tokens" if few else "")
    return kept and f"keeps copies while there is room ({REPACK_VARIABLE}): {kept}"


def run(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, problem: Problem
) -> Tensor:
    """y [M, N] in x's dtype, as `Kernel.run` asks."""
    layer = Layer(weight, scale, zero_point, problem)
    if not problem.int8_activations:
        return _float_linear(x, layer, bias)
    if _takes_integers(problem):
        a, token_scale = quantize_tokens(x)
        y = int8_linear(a, token_scale, layer, bias, x.dtype)
        if y is not None:
            return y
        y = integer_linear(a.unsqueeze(0), layer).mul_(row_factors(scale)).mul_(token_scale)
        return (y if bias is None else y.add_(bias)).to(x.dtype).contiguous()
    # float16 may be too narrow for t a
    rounded = round_tokens(x, torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32)
    bias = None if bias is None else bias.to(rounded.dtype)
    return _float_linear(rounded, layer, bias).to(x.dtype)


def _float_linear(x: Tensor, layer: Layer, bias: Tensor | None) -> Tensor:
    problem = layer.problem
    if problem.device != "cpu" or not (problem.rows and problem.in_features and problem.out_features):
        return block_linear(x, layer, bias)
    if x.dtype != torch.bfloat16:
        if problem.bits == 8 and problem.rows <= FIXED_POINT_ROWS and _takes_integers(problem):
            y = fixed_point_linear(x, layer)
            if y is not None:
                return finish(y, layer.scale, bias, x.dtype)
        return block_linear(x, layer, bias)
    y = _few_rows(x, layer, bias, INT4_ROWS, INT4_ROWS, INT4_ROWS_8BIT, INT8_ROWS)
    if y is None:
        y = dense_linear(x, layer, bias)
    if y is None:
        y = _few_rows(
            x, layer, bias, INT4_ROWS_ALONE, INT4_ROWS_UNGROUPED_ALONE, INT4_ROWS_8BIT_ALONE, INT8_ROWS_ALONE
        )
    return block_linear(x, layer, bias) if y is None else y


def _few_rows(
    x: Tensor, layer: Layer, bias: Tensor | None, grouped: int, ungrouped: int, eight: int, int8: int
) -> Tensor | None:
    """A product that reads few bits a weight, or None beyond the rows given for each."""
    problem, rows = layer.problem, layer.problem.rows
    if problem.bits == 8 and not problem.group_size:
        # torch's int8 product reads past the end of rows of other widths
        if layer.zero_point is None and HAS_INT4 and rows <= int8 and problem.in_features % 32 == 0:
            y = torch._weight_int8pack_mm(x.contiguous(), layer.rows(), x.new_ones(problem.out_features))
            return finish(y, layer.scale, bias, x.dtype)
    if not HAS_INT4 or rows > (eight if problem.bits == 8 else grouped if problem.group_size else ungrouped):
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
