"""Activations to int8, a row at a time, equal to `functional.linear.quantize_activations`.

    t[m] = max|x[m]| / 127,     a[m, k] = round(x[m, k] / t[m])

Written either as it lies (PLANES = 1) or in the order that packed words ask for: plane j of P holds the columns with
k mod P = j, one after the other, so that the columns of a byte's fields are at one place in P planes (`words.py`).
"""

import triton
import triton.language as tl


@triton.jit
def quantize_kernel(
    x, codes, token_scale, in_features, x_stride, plane_size, PLANES: tl.constexpr, BLOCK: tl.constexpr
):
    """One row: x float [M, x_stride] -> codes int8 [M, PLANES, plane_size], 0 beyond in_features; t float32 [M]."""
    m = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, in_features, BLOCK):
        ks = start + tl.arange(0, BLOCK)
        size = tl.abs(tl.load(x + m * x_stride + ks, mask=ks < in_features, other=0).to(tl.float32))
        # the maximum skips NaN, infinity it keeps
        largest = tl.maximum(largest, tl.where(size < float("inf"), size, float("inf")))
    largest = tl.max(largest, axis=0)
    # the reference takes the reciprocal and then multiplies; the constants keep full-precision divisions
    positive = largest > 0
    inverse = tl.where(positive, tl.div_rn(1.0, tl.where(positive, largest, 1.0)) * 127.0, 0.0)
    tl.store(token_scale + m, tl.where(largest < float("inf"), tl.div_rn(largest, 127.0), float("nan")))
    # adding and subtracting a number this large rounds to the nearest integer, ties to even
    NO_FRACTION: tl.constexpr = 12582912.0
    for start in range(0, PLANES * plane_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        # neighbours in the output: at = plane * plane_size + place
        ks = at % plane_size * PLANES + at // plane_size
        value = tl.load(x + m * x_stride + ks, mask=ks < in_features, other=0).to(tl.float32) * inverse
        # a row that has no scale gives NaN by its t, whatever its codes
        value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
        value = value + NO_FRACTION - NO_FRACTION
        value = tl.minimum(tl.maximum(value, -127.0), 127.0)
        tl.store(codes + m * (PLANES * plane_size) + at, value.to(tl.int8), mask=at < PLANES * plane_size)
