"""Products with exact integer sums: int8 activations, and float activations in fixed point.

Fixed point: a row of x is t r with integers r, |r| <= 127 * 256^(D-1), cut into D balanced int8 digits:

    r = sum_d 256^d r_d,     y[m, n] = t[m] s[n] sum_d 256^d sum_k r_d[m, k] (q[n, k] - z[n])

The sums over k are exact in int32, so the only error is that of r: 2^-24 of the row's largest entry with the three
digits that bfloat16 and float16 get, 2^-32 with the four of float32. Integer products with VNNI run at more than twice
the speed of bfloat16 ones, and codes of 8 bits need no conversion: for few rows that beats dequantizing. Scales of
groups would need the sums of each group apart, which it does not pay to take.

int8 activations are the same with one digit. Their products take the steps q - z from a copy in the order of torch's
matrix library, which multiplies by s too; without that copy codes are unpacked at every call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...functional.dispatch import Problem
from .activations import scale_tokens
from .blocks import Layer, code_blocks, rows_of
from .copies import copy_of


# int32 sums of products of int8 can't overflow below this many terms, zero points included
LONGEST_ROW = 1 << 16
# float32 sums that stay in cache until they have their scale: a product of many rows is taken in parts
SUMS = 1 << 20
# without VNNI torch's integer product is slow, and its 16-bit sums can saturate
HAS_INTEGERS = bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)()) and torch.backends.mkldnn.is_available()
# with fewer rows or columns the library may have nothing but plain loops, a thousand times slower (oneDNN 3.12)
ORDER_SIDE = 512
HAS_ORDER = HAS_INTEGERS and hasattr(torch.ops.onednn, "qlinear_pointwise")


class Int8Operand(NamedTuple):
    """q - z in the order of torch's matrix library; s float32 [N]."""

    steps: Tensor
    scale: Tensor


def int8_linear(
    a: Tensor, token_scale: Tensor, layer: Layer, bias: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """t (a (q - z)^T s) + bias in `dtype`, equal to the reference, for a int8 [M, K] and t float32 [M, 1].

    None where there is no copy in the library's order.
    """
    problem = layer.problem
    if not takes_order(problem):
        return None
    operand = copy_of(layer, _pack_int8, (problem.in_features + 4) * problem.out_features)
    if operand is None:
        return None
    y = torch.empty(problem.rows, problem.out_features, dtype=dtype)
    step = max(1, SUMS // problem.out_features)
    if problem.rows <= step:
        return scale_tokens(_order_linear(a, operand), token_scale, bias, y)
    for a_part, t, y_part in zip(a.split(step), token_scale.split(step), y.split(step), strict=True):
        scale_tokens(_order_linear(a_part, operand), t, bias, y_part)
    return y


def _order_linear(a: Tensor, operand: Int8Operand) -> Tensor:
    """a (q - z)^T s, float32 [M, N]."""
    return torch.ops.onednn.qlinear_pointwise(
        a, 1.0, 0, operand.steps, operand.scale, None, None, 1.0, 0, torch.float32, "none", [], ""
    )


def takes_order(problem: Problem) -> bool:
    """Whether the library multiplies this shape in its own order."""
    # 8-bit codes less their zero point are no int8
    fits = problem.bits != 8 or not problem.asymmetric
    return HAS_ORDER and fits and min(problem.out_features, problem.in_features) >= ORDER_SIDE


def _pack_int8(layer: Layer) -> Int8Operand:
    problem = layer.problem
    steps = torch.empty(problem.out_features, problem.in_features, dtype=torch.int8)
    for part, codes in code_blocks(layer):
        steps[part] = codes
        if layer.zero_point is not None:
            steps[part].sub_(rows_of(layer.zero_point, part))
    scale = layer.scale.detach().to(torch.float32).view(-1).expand(problem.out_features).contiguous()
    return Int8Operand(torch.ops.onednn.qlinear_prepack(steps, None), scale)


def fixed_point_linear(x: Tensor, layer: Layer) -> Tensor | None:
    """x (q - z)^T float32 [M, N], without s. None when x has NaN or infinity, which integers can't hold."""
    digits = 4 if x.dtype == torch.float32 else 3
    values = x.to(torch.float64 if digits == 4 else torch.float32)
    largest = values.abs().amax(dim=1, keepdim=True)
    if not bool(torch.isfinite(largest).all()):
        return None
    # the bound is far below any activation; a row of zeros needs it
    unit = largest.clamp_min(1e-30) / (127.0 * 256 ** (digits - 1))
    rest = torch.round(values / unit).to(torch.int32)
    planes = torch.empty(digits, *x.shape, dtype=torch.int8)
    for plane in planes[:-1]:
        # the lowest byte, read as two's complement, is the digit; taking it off carries into the next
        plane.copy_(rest)
        rest = (rest - plane) >> 8
    planes[-1].copy_(rest)
    return integer_linear(planes, layer).mul_(unit.to(torch.float32))


def integer_linear(digits: Tensor, layer: Layer) -> Tensor:
    """sum_d 256^d digits[d] (q - z)^T, float32 [M, N], for digits int8 [D, M, K]; the sums of one digit are exact.

    The columns of the result lie together: [N, M] is how torch's integer product is fast.
    """
    zero_point, problem = layer.zero_point, layer.problem
    planes, rows, width = digits.shape
    stacked = digits.reshape(planes * rows, width)
    row_sums = None if zero_point is None else stacked.sum(dim=1, dtype=torch.int32)
    y = torch.empty(problem.out_features, rows, dtype=torch.float32)
    for part, codes in _resident_codes(layer) or code_blocks(layer):
        sums = _int_mm(codes.contiguous(), stacked)
        if row_sums is not None:
            sums = sums - rows_of(zero_point, part).to(torch.int32) * row_sums
        total = y[part].copy_(sums[:, (planes - 1) * rows :])
        for d in reversed(range(planes - 1)):
            total.mul_(256.0).add_(sums[:, d * rows : (d + 1) * rows])
    return y.t()


def _resident_codes(layer: Layer) -> list[tuple[slice, Tensor]] | None:
    """int8 codes [N, K] that lie in memory: the stored ones at 8 bits, a copy where layers are small."""
    problem = layer.problem
    if problem.bits == 8:
        codes = layer.rows()
    elif not takes_order(problem):
        codes = copy_of(layer, _unpack_all, problem.out_features * problem.in_features)
    else:
        codes = None
    return None if codes is None else [(slice(0, problem.out_features), codes)]


def _unpack_all(layer: Layer) -> Tensor:
    all_codes = torch.empty(layer.problem.out_features, layer.problem.in_features, dtype=torch.int8)
    for part, codes in code_blocks(layer):
        all_codes[part] = codes
    return all_codes


def _int_mm(codes: Tensor, a: Tensor) -> Tensor:
    """codes a^T in int32; torch is fast for one row of `a`, and for multiples of four with the codes on the left."""
    rows = a.shape[0]
    if rows <= 4:
        return torch.cat([torch._int_mm(row, codes.t()) for row in a.split(1)]).t()
    return torch._int_mm(codes, F.pad(a, (0, 0, 0, -rows % 4)).t())[:, :rows]
