"""One row of int8 activations times packed weights, four products an instruction (dp4a), from the stored words.

A 32-bit word of the checkpoint holds 4 P codes, P fields a byte. With F_j(w) = (w >> j fields) and the mask of every
byte's lowest field, F_j of word i are the codes at columns 4 P i + P b + j of bytes b = 0..3: one byte each, P columns
apart. Activations lie in the same order: plane j, written by `activations.py`, holds the columns k with k mod P = j;
its word i is the partner:

    y[n] = t sum_g s[n, g] sum_{i in g} sum_j (dp4a(F_j(word[n, i]), plane[j, i]) - z[n, g] dp4a(1, plane[j, i]))

where z includes the grid's offset. A shift, a mask and a dp4a serve four weights; unpacking them for a tensor core
would cost more than the product.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["split_steps"])
def word_kernel(
    planes, token_scale, weight, scale, zero_point, bias, y,
    out_features, words, row_bytes, low_bytes, plane_words, groups, scale_stride, split_steps,
    FIELD: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    PARTIAL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, STAGES: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """BN outputs over one part of K.

    planes int32 [P, plane_words], zeros at the end; token_scale float32 [1]; weight int8 [N, row_bytes], rows on
    addresses that 4 divides; scale, zero_point, bias as in `tiles.py`; y [N], or [parts, N] sums if PARTIAL. `words` a
    row; of 3 bits, those of the plane of the low two, whose `low_bytes` bytes come first.
    """
    PER_BYTE: tl.constexpr = 4 if FIELD == 3 else 8 // FIELD
    WIDTH: tl.constexpr = 2 if FIELD == 3 else FIELD
    MASK: tl.constexpr = -1 if FIELD == 8 else ((1 << WIDTH) - 1) * 0x01010101
    part = tl.program_id(1)
    ns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows beyond the end read the last one and are not stored
    n_read = tl.minimum(ns, out_features - 1).to(tl.int64)[:, None]
    rows = weight + n_read * row_bytes
    scale_rows, zero_rows = scale + n_read * scale_stride, zero_point + n_read * scale_stride
    sums = tl.zeros((BLOCK_N, BLOCK_W), tl.int32 if GROUP == 0 else tl.float32)
    activation_sums = tl.zeros((BLOCK_W,), tl.int32)
    first = part * split_steps
    last = tl.minimum(first + split_steps, tl.cdiv(words, BLOCK_W))
    for step in tl.range(first, last, num_stages=STAGES):
        at = step * BLOCK_W + tl.arange(0, BLOCK_W)
        inside = at < words
        word = tl.load(rows.to(tl.pointer_type(tl.int32)) + at[None, :], mask=inside[None, :], other=0)
        if FIELD == 3:
            high = tl.load(
                (rows + low_bytes).to(tl.pointer_type(tl.int16)) + at[None, :], mask=inside[None, :], other=0
            )
            high = high.to(tl.int32)
        dots = tl.zeros((BLOCK_N, BLOCK_W), tl.int32)
        ones = tl.zeros((BLOCK_W,), tl.int32)
        for j in tl.static_range(PER_BYTE):
            a = tl.load(planes + j * plane_words + at, mask=inside, other=0)
            fields = (word >> (j * WIDTH)) & MASK
            if FIELD == 3:
                # bits j, 4 + j, 8 + j and 12 + j of the high plane belong to the four bytes
                spread = (high >> j) & 0x1111
                spread = (spread | (spread << 8)) & 0x00110011
                fields |= ((spread | (spread << 4)) & 0x01010101) << 2
            dots = _dp4a(fields, tl.broadcast_to(a[None, :], (BLOCK_N, BLOCK_W)), dots, EMULATED)
            ones = _dp4a(tl.full((BLOCK_W,), 0x01010101, tl.int32), a, ones, EMULATED)
        if GROUP == 0:
            sums += dots
            activation_sums += ones
        else:
            # a word's columns lie in one group
            group = tl.minimum(at * (4 * PER_BYTE) // GROUP, groups - 1)[None, :]
            if HAS_ZERO:
                dots -= (tl.load(zero_rows + group).to(tl.int32) + OFFSET) * ones[None, :]
            elif OFFSET != 0:
                dots -= OFFSET * ones[None, :]
            sums += dots.to(tl.float32) * tl.load(scale_rows + group).to(tl.float32)
    total = tl.sum(sums, axis=1)
    if GROUP == 0:
        if HAS_ZERO:
            total -= (tl.reshape(tl.load(zero_rows), (BLOCK_N,)).to(tl.int32) + OFFSET) * tl.sum(
                activation_sums, axis=0
            )
        elif OFFSET != 0:
            total -= OFFSET * tl.sum(activation_sums, axis=0)
    if not PARTIAL:
        total = total.to(tl.float32)
        if GROUP == 0:
            total *= tl.reshape(tl.load(scale_rows), (BLOCK_N,)).to(tl.float32)
        total *= tl.load(token_scale)
        if HAS_BIAS:
            total += tl.load(bias + tl.minimum(ns, out_features - 1)).to(tl.float32)
        tl.store(y + ns, total.to(y.dtype.element_ty), mask=ns < out_features)
    else:
        tl.store(y + part.to(tl.int64) * out_features + ns, total, mask=ns < out_features)


@triton.jit
def _dp4a(a, b, c, EMULATED: tl.constexpr):
    """c + sum_b a_b b_b over the four signed bytes of int32 a and b. EMULATED: in the interpreter, without PTX."""
    if EMULATED:
        for byte in tl.static_range(4):
            c += (a << (24 - 8 * byte) >> 24) * (b << (24 - 8 * byte) >> 24)
    else:
        c = tl.inline_asm_elementwise("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)
    return c
