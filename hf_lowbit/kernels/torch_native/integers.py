"""Products with exact integer sums: int8 activations, and float activations in fixed point.

Fixed point: a row of x is t r with integers r, |r| <= 127 * 256^(D-1), cut into D balanced int8 digits:

    r = sum_d 256^d r_d,     y[m, n] = t[m] s[n] sum_d 256^d sum_k r_d[m, k] (q[n, k] - z[n])

The sums over k are exact in int32, so the only error is that of r: 2^-24 of the row's largest entry with the three
digits that bfloat16 and float16 get, 2^-32 with the four of float32. Integer products with VNNI run at more than twice
the speed of bfloat16 ones, and codes of 8 bits need no conversion: for few rows that beats dequantizing. Scales of
groups would need the sums of each group apart, which it does not pay to take.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import Layer, code_blocks, rows_of
from .copies import copy_of


# int32 sums of products of int8 can't overflow below this many terms, zero points included
LONGEST_ROW = 1 << 16
# rows up to which a copy of the codes at 8 bits each is used instead of unpacking them again
CODES_ROWS = 16
# without VNNI torch's integer product is slow, and its 16-bit sums can saturate
HAS_INTEGERS = bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)()) and torch.backends.mkldnn.is_available()


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
    """int8 codes [N, K] that lie in memory: the stored ones at 8 bits, a copy for few rows of int8 activations."""
    problem = layer.problem
    if problem.bits == 8:
        codes = layer.weight
    elif problem.int8_activations and problem.rows <= CODES_ROWS:
        codes = copy_of(layer, _unpack_all)
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
