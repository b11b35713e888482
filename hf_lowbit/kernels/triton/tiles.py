"""Products of tiles on tensor cores: y^T = W x^T, with W unpacked on its way into the registers of the product.

W is the left operand, whose fragments may come from registers (wgmma reads its right one only from shared memory):
unpacked codes never go back to memory. It also puts N on the long side of the hardware's tile and M, few rows when
generating, on the short one.

    float, codes first:  y[m, n] = sum_g s[n, g] sum_{k in g} x[m, k] (q[n, k] - z[n, g])     q - z exact in x's dtype
    float, scale first:  y[m, n] = sum_k x[m, k] w[n, k],   w = s (q - z) rounded to x's dtype, as the definition says
    int8:                y[m, n] = t[m] sum_g s[n, g] sum_{k in g} a[m, k] (q[n, k] - z[n, g])     inner sums in int32

K may be cut into parts, each computed by its own programs: few rows of x and few columns of tiles would leave
most of the device idle. The parts go to a buffer that `splits.py` sums in a fixed order, so results never depend on
timing; there are no atomic additions.

Shape legend: M rows of x, N out_features, K in_features, BM, BN, BK a tile's share of them.
"""

import triton
import triton.language as tl

from .fields import load_codes, load_numbers


@triton.jit(do_not_specialize=["rows", "split_steps"])
def tile_kernel(
    x, token_scale, weight, scale, zero_point, bias, y,
    rows, out_features, in_features, x_stride, row_bytes, scale_stride, split_steps,
    FIELD: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    INT8: tl.constexpr, SCALE_FIRST: tl.constexpr, SCALE_AHEAD: tl.constexpr, PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, ALIGNED: tl.constexpr, UPCAST: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """One [BN, BM] tile of y^T over one part of K.

    x float or int8 [M, x_stride], token_scale float32 [M] (INT8 only), weight int8 [N, row_bytes], scale and
    zero_point [N, scale_stride] (0: one for all), bias [N]; y [M, N], or, if PARTIAL, [parts, M, N] unfinished sums.
    GROUP 0: a scale a row. UPCAST, EMULATED: for the interpreter, which cannot multiply bfloat16 and knows no PTX.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    m_tile, n_tile = _place(tile, tl.cdiv(rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N))
    ms, ns = m_tile * BLOCK_M + tl.arange(0, BLOCK_M), n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows of W beyond the end read the last one and are not stored; those of x are not read
    m_read, n_read = tl.minimum(ms, rows - 1), tl.minimum(ns, out_features - 1)
    x_rows = x + m_read.to(tl.int64)[None, :] * x_stride
    n_read = n_read.to(tl.int64)[:, None]
    w_rows = weight + n_read * row_bytes
    scale_rows, zero_rows = scale + n_read * scale_stride, zero_point + n_read * scale_stride
    EXACT: tl.constexpr = INT8 and GROUP == 0
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if EXACT else tl.float32)
    first = part * split_steps
    zero, group_scale = _group(scale_rows, zero_rows, first * BLOCK_K, GROUP, OFFSET, HAS_ZERO)
    for step in range(first, tl.minimum(first + split_steps, tl.cdiv(in_features, BLOCK_K))):
        k = step * BLOCK_K
        ks = k + tl.arange(0, BLOCK_K)
        inside = (ms < rows)[None, :] if EVEN_K else (ms < rows)[None, :] & (ks < in_features)[:, None]
        a = tl.load(x_rows + ks[:, None], mask=inside, other=0)
        if UPCAST:
            a = a.to(tl.float32)
        if GROUP != 0 and not SCALE_AHEAD:
            zero, group_scale = _group(scale_rows, zero_rows, k, GROUP, OFFSET, HAS_ZERO)
        if GROUP != 0 and SCALE_AHEAD:
            # single values are too small for asynchronous copies: those of the next step are on their way in this one
            after = tl.minimum(k + BLOCK_K, in_features - 1)
            next_zero, next_scale = _group(scale_rows, zero_rows, after, GROUP, OFFSET, HAS_ZERO)
        if INT8:
            codes = load_codes(w_rows, zero, k, in_features, FIELD, BLOCK_K, EVEN_K, ALIGNED)
            exact = tl.dot(codes, a, out_dtype=tl.int32)
            if FIELD == 8 and HAS_ZERO:
                exact -= zero.to(tl.int32) * tl.sum(a.to(tl.int32), axis=0)[None, :]
            if GROUP == 0:
                sums += exact
            else:
                sums += exact.to(tl.float32) * group_scale
        else:
            numbers = load_numbers(
                w_rows, zero, k, in_features, a.dtype, HAS_ZERO, FIELD, BLOCK_K, EVEN_K, ALIGNED, EMULATED
            )
            if GROUP == 0:
                sums = tl.dot(numbers, a, sums, input_precision=PRECISION)
            elif SCALE_FIRST:
                scaled = (numbers.to(tl.float32) * group_scale).to(a.dtype)
                sums = tl.dot(scaled, a, sums, input_precision=PRECISION)
            else:
                sums += tl.dot(numbers, a, input_precision=PRECISION) * group_scale
        if GROUP != 0 and SCALE_AHEAD:
            zero, group_scale = next_zero, next_scale
    inside = (ns < out_features)[:, None] & (ms < rows)[None, :]
    at = ms.to(tl.int64)[None, :] * out_features + ns[:, None]
    if not PARTIAL:
        total = sums.to(tl.float32)
        if GROUP == 0:
            total *= group_scale
        if INT8:
            total *= tl.load(token_scale + m_read)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + n_read).to(tl.float32)
        tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
    else:
        tl.store(y + part.to(tl.int64) * rows * out_features + at, sums, mask=inside)


@triton.jit
def _group(scale_rows, zero_rows, k, GROUP: tl.constexpr, OFFSET: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Of the group of column k: what a stored field is above its number, int8 [BN, 1] (the grid's offset plus the zero
    point), and the scale, float32 [BN, 1]."""
    group = 0 if GROUP == 0 else k // GROUP
    if HAS_ZERO:
        zero = tl.load(zero_rows + group) + OFFSET
    else:
        zero = tl.zeros(zero_rows.shape, tl.int8) + OFFSET
    return zero.to(tl.int8), tl.load(scale_rows + group).to(tl.float32)


@triton.jit
def _place(tile, m_tiles, n_tiles):
    """Tiles in bands of eight rows of tiles, so that those that run together share both x and W in the cache."""
    BAND: tl.constexpr = 8
    band = tile // (BAND * n_tiles)
    height = tl.minimum(m_tiles - band * BAND, BAND)
    within = tile % (BAND * n_tiles)
    return band * BAND + within % height, within // height
