"""The sum over the parts of K, in a fixed order, then what comes after it: scale, token scale, bias, rounding."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def sum_kernel(
    parts, token_scale, scale, bias, y, rows, out_features, scale_stride,
    SPLITS: tl.constexpr, HAS_SCALE: tl.constexpr, INT8: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """parts [SPLITS, M, N] int32 or float32 -> y [M, N]. HAS_SCALE: sums still lack their scale, [N, 1] or [1, 1]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = rows.to(tl.int64) * out_features
    inside = at < size
    total = tl.load(parts + at, mask=inside, other=0)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(parts + part * size + at, mask=inside, other=0)
    total = total.to(tl.float32)
    n = at % out_features
    if HAS_SCALE:
        total *= tl.load(scale + n * scale_stride, mask=inside, other=0).to(tl.float32)
    if INT8:
        total *= tl.load(token_scale + at // out_features, mask=inside, other=0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
