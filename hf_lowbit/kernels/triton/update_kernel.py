"""The update of direct training in one pass: the same bits as torch's operations (`functional/update.py`).

A program has one block of a state's row (`moments.blocks_of`), of whole bytes: decode the moments, direction, encode
them, noise, round, move, repack. Sums and products are not fused (`enable_fp_fusion=False` at the launch), roots and
quotients round to nearest, all else is integers.

Shape legend: N rows, K columns, B blocks a row of `width` columns each, BLOCK the next power of two.
"""

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """lowbias32 of uint32, see functional/noise.py."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def load_moment(
    codes, base, n, ks, inside, columns, row_bytes, block, blocks, BITS: tl.constexpr, SIGNED: tl.constexpr
):
    """A moment as float32; functional/moments.py, `decode`."""
    if BITS >= 16:
        return tl.load(codes + n * columns + ks, mask=inside, other=0.0).to(tl.float32)
    else:
        SHIFT: tl.constexpr = 20 if BITS == 8 else 23
        if BITS == 8:
            field = tl.load(codes + n * row_bytes + ks, mask=inside, other=0).to(tl.int32)
            if SIGNED:
                field = (field ^ 128) - 128
        else:
            field = tl.load(codes + n * row_bytes + (ks >> 1), mask=inside, other=0).to(tl.int32)
            field = (field >> ((ks & 1) * 4)) & 15
            if SIGNED:
                field = (field ^ 8) - 8
        level = tl.abs(field)
        pattern = (level + tl.load(base + n * blocks + block).to(tl.int32)) << SHIFT
        x = pattern.to(tl.float32, bitcast=True)
        if SIGNED:
            x = tl.where(field == 0, 0.0, tl.where(field < 0, -x, x))
        return x


@triton.jit
def save_moment(
    codes, base, n, ks, inside, columns, row_bytes, block, blocks, x, noise, BITS: tl.constexpr, SIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 as a moment; `encode`, and for 16 bits `to_bfloat16`."""
    if BITS == 32:
        tl.store(codes + n * columns + ks, x, mask=inside)
    elif BITS == 16:
        cut = (x.to(tl.int32, bitcast=True) + (noise & 0xFFFF).to(tl.int32)) & -65536
        # exact: what bfloat16 does not hold is 0
        tl.store(codes + n * columns + ks, cut.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=inside)
    else:
        SHIFT: tl.constexpr = 20 if BITS == 8 else 23
        FULL: tl.constexpr = 255 if BITS == 8 else 15
        TOP: tl.constexpr = FULL // 2 if SIGNED else FULL
        LOW: tl.constexpr = 0 if SIGNED else 1
        bits = x.to(tl.int32, bitcast=True)
        pattern = tl.where(inside, bits & 0x7FFFFFFF, 0)
        start = tl.maximum((tl.max(pattern, axis=0) >> SHIFT) - (TOP - 1), 0)
        code = (((noise & ((1 << SHIFT) - 1)).to(tl.int32) + pattern) >> SHIFT) - start
        code = tl.minimum(tl.maximum(code, LOW), TOP)
        if SIGNED:
            code = tl.where(bits < 0, -code, code)
        # every field of a byte has been read before one is written
        tl.debug_barrier()
        tl.store(base + n * blocks + block, start.to(tl.int16))
        if BITS == 8:
            tl.store(codes + n * row_bytes + ks, (code & 255).to(tl.uint8), mask=inside)
        else:
            store_fields(codes + n * row_bytes, code & 15, ks, inside, 4, BLOCK)


@triton.jit
def store_fields(row, fields, ks, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Fields of WIDTH bits to the bytes of a row; blocks begin at whole bytes."""
    PER_BYTE: tl.constexpr = 8 // WIDTH
    shifted = tl.where(inside, fields, 0) << (ks % PER_BYTE * WIDTH)
    packed = tl.sum(tl.reshape(shifted, (BLOCK // PER_BYTE, PER_BYTE)), axis=1)
    first = tl.min(tl.reshape(ks, (BLOCK // PER_BYTE, PER_BYTE)), axis=1)
    whole = tl.max(tl.reshape(inside.to(tl.int32), (BLOCK // PER_BYTE, PER_BYTE)), axis=1)
    tl.store(row + first // PER_BYTE, packed.to(tl.int8), mask=whole > 0)


@triton.jit(do_not_specialize=["row_key", "column_key"])
def update_kernel(
    stored, scale, zero_point, grad, m_codes, m_base, v_codes, v_base, counts,
    columns, row_bytes, grad_row, grad_column, width, blocks, state_row, group, scale_stride, row_key, column_key,
    beta1, rest1, beta2, rest2, eps, factor, rate, decay,
    FIELD: tl.constexpr, QMIN: tl.constexpr, QMAX: tl.constexpr, STATE_BITS: tl.constexpr, RULE: tl.constexpr,
    FIRST: tl.constexpr, NESTEROV: tl.constexpr, HAS_ZERO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """stored int8 [N, row_bytes], states and counts int64 [2] (codes changed, levels asked for) are overwritten."""
    n, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    ks = block * width + place
    inside = (place < width) & (ks < columns)
    row_word = mix((n.to(tl.int32) + row_key).to(tl.uint32))
    word = mix(row_word + mix((ks + column_key).to(tl.uint32)))
    g = tl.load(grad + n * grad_row + ks.to(tl.int64) * grad_column, mask=inside, other=0.0).to(tl.float32)
    m = load_moment(m_codes, m_base, n, ks, inside, columns, state_row, block, blocks, STATE_BITS, True)
    noise = word * 0x31848BAB
    noise = noise ^ (noise >> 15)
    if RULE == "adamw":
        v = load_moment(v_codes, v_base, n, ks, inside, columns, state_row, block, blocks, STATE_BITS, False)
        m = m * beta1 + g * rest1
        v = v * beta2 + g * g * rest2
        u = tl.div_rn(m, tl.sqrt_rn(v) + eps) * factor
        second = (noise.to(tl.int32, bitcast=True) >> 8).to(tl.uint32, bitcast=True) ^ (noise << 24)
        save_moment(v_codes, v_base, n, ks, inside, columns, state_row, block, blocks, v, second, STATE_BITS, False,
                    BLOCK)  # fmt: skip
    elif RULE == "lion":
        total = m * beta1 + g * rest1
        m = m * beta2 + g * rest2
        u = (total > 0).to(tl.float32) - (total < 0).to(tl.float32)
    else:
        m = g if FIRST else m * beta1 + g
        u = m * beta1 + g if NESTEROV else m
    save_moment(m_codes, m_base, n, ks, inside, columns, state_row, block, blocks, m, noise, STATE_BITS, True, BLOCK)

    row = stored + n * row_bytes
    half = (columns + 3) // 4
    if FIELD == 8:
        q = tl.load(row + ks, mask=inside, other=0).to(tl.int32)
    elif FIELD == 3:
        low = tl.load(row + ks // 4, mask=inside, other=0).to(tl.int32) >> (ks % 4 * 2)
        high = tl.load(row + half + ks // 8, mask=inside, other=0).to(tl.int32) >> (ks % 8)
        q = ((low & 3) | ((high & 1) << 2)) + QMIN
    else:
        PER_BYTE: tl.constexpr = 8 // FIELD
        byte = tl.load(row + ks // PER_BYTE, mask=inside, other=0).to(tl.int32)
        q = ((byte >> (ks % PER_BYTE * FIELD)) & ((1 << FIELD) - 1)) + QMIN
    at = n * scale_stride + ks // group
    inverse = tl.div_rn(1.0, tl.load(scale + at, mask=inside, other=1.0).to(tl.float32))
    value = q.to(tl.float32)
    if HAS_ZERO:
        value = value - tl.load(zero_point + at, mask=inside, other=0).to(tl.float32)
    step = u * rate * inverse - value * decay
    # below 1 whatever the word: 2^-31 (1 - 2^-24)
    size = tl.abs(step) - (word & 0x7FFFFFFF).to(tl.int32).to(tl.float32) * 4.656612595521636e-10
    SPAN: tl.constexpr = QMAX - QMIN
    size = tl.minimum(size, SPAN * 1.0)
    whole = size.to(tl.int32)
    whole += (size > whole.to(tl.float32)).to(tl.int32)
    whole = tl.where(inside, whole, 0)
    moved = tl.minimum(tl.maximum(q + tl.where(step < 0, -whole, whole), QMIN), QMAX)
    changed = tl.where(inside & (moved != q), 1, 0)
    tl.atomic_add(counts, tl.sum(changed, axis=0).to(tl.int64))
    tl.atomic_add(counts + 1, tl.sum(whole, axis=0).to(tl.int64))
    tl.debug_barrier()
    if FIELD == 8:
        tl.store(row + ks, moved.to(tl.int8), mask=inside)
    elif FIELD == 3:
        store_fields(row, (moved - QMIN) & 3, ks, inside, 2, BLOCK)
        store_fields(row + half, (moved - QMIN) >> 2, ks, inside, 1, BLOCK)
    else:
        store_fields(row, moved - QMIN, ks, inside, FIELD, BLOCK)
