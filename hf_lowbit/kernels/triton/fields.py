"""Codes of a tile of weights, unpacked in registers from the checkpoint's bytes (docs/format.md).

A byte holds 8 / width fields, the first in its lowest bits: neighbours in k. Joining the fields of a byte, [BN, bytes]
-> [BN, bytes, fields] -> [BN, BK], moves nothing between threads: a byte is read once, by the thread whose part of the
product needs it. Three bits are a plane of the two low bits, whose bytes come first, and a plane of the high bit.

Numbers are made without conversion instructions. In a float of 2^e with m bits of mantissa the lowest m bits count
units of 2^(e-m): or-ing a field u into 1024 (float16) or 128 (bfloat16) gives 1024 + u or 128 + u exactly, and one
subtraction, exact too, takes off the constant, the grid's offset and the zero point. Two fields are done at once, in
the halves of a 32-bit register (Kim et al. 2022, arXiv 2211.10017, use the same trick).

Everything here is compiled by Triton and runs on the device.
"""

import triton
import triton.language as tl


@triton.jit
def load_codes(
    rows, zero, k, in_features,
    FIELD: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Codes less their zero point, int8 [BN, BK], from column `k` on; `zero` int8 [BN, 1] is the offset included.

    rows [BN, 1] points to the first bytes of rows. Columns from in_features on give numbers without meaning: x is 0
    there. At 8 bits the zero point, which would not fit, is left to the caller.
    """
    if FIELD == 8:
        return _load(rows, k, in_features, BLOCK_K, EVEN_K)
    # four fields go to the bytes of one register
    if FIELD == 4:
        v = _load_pairs(rows, k // 4, tl.cdiv(in_features, 2), BLOCK_K // 4, EVEN_K, ALIGNED)
        q = (v | (v << 8)) & 0x00FF00FF
        q = (q | (q << 4)) & 0x0F0F0F0F
    else:
        v = _load(rows, k // 4, tl.cdiv(in_features, 4), BLOCK_K // 4, EVEN_K).to(tl.int32) & 0xFF
        q = (v | (v << 12)) & 0x000F000F
        q = (q | (q << 6)) & 0x03030303
        if FIELD == 3:
            high = _load_high(rows, k, in_features, BLOCK_K, EVEN_K).to(tl.int32) & 0xFF
            high |= high << 7
            high |= high << 14
            q |= (high & 0x01010101) << 2
    # the top bit of each byte keeps borrows from crossing
    q = ((q | -0x7F7F7F80) - (zero.to(tl.int32) & 0xFF) * 0x01010101) ^ -0x7F7F7F80
    even, odd = tl.join(q.to(tl.int8), (q >> 16).to(tl.int8)), tl.join((q >> 8).to(tl.int8), (q >> 24).to(tl.int8))
    return tl.reshape(tl.join(even, odd), (v.shape[0], BLOCK_K))


@triton.jit
def load_numbers(
    rows, zero, k, in_features, DTYPE: tl.constexpr, HAS_ZERO: tl.constexpr,
    FIELD: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, ALIGNED: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """The same codes as numbers of DTYPE, all of them exact; 8 bits included."""
    if FIELD == 8:
        codes = load_codes(rows, zero, k, in_features, FIELD, BLOCK_K, EVEN_K, ALIGNED)
        numbers = (codes.to(tl.float32) - zero.to(tl.float32)).to(DTYPE) if HAS_ZERO else codes.to(DTYPE)
    elif DTYPE == tl.float32:
        numbers = load_codes(rows, zero, k, in_features, FIELD, BLOCK_K, EVEN_K, ALIGNED).to(tl.float32)
    else:
        ONE: tl.constexpr = 0x6400 if DTYPE == tl.float16 else 0x4300
        BASE: tl.constexpr = 1024.0 if DTYPE == tl.float16 else 128.0
        bits = load_bits(rows, k, in_features, ONE, FIELD, BLOCK_K, EVEN_K)
        numbers = _subtract(bits.to(DTYPE, bitcast=True), (zero.to(tl.float32) + BASE).to(DTYPE), EMULATED)
    return numbers


@triton.jit
def _subtract(a, b, EMULATED: tl.constexpr):
    """a - b, float16 or bfloat16 [BN, BK] and [BN, 1], exact for what comes here.

    Two at a time: for sm_80 the compiler would swap the halves of each register before and after. EMULATED: in the
    interpreter, without PTX.
    """
    if EMULATED:
        difference = a - b
    elif a.dtype == tl.float16:
        difference = tl.inline_asm_elementwise("sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.float16, True, 2)
    else:
        # there is no bfloat16 subtraction before sm_90: a times 1, less b
        difference = tl.inline_asm_elementwise(
            "{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }",
            "=r,r,r", [a, -b], tl.bfloat16, True, 2,
        )  # fmt: skip
    return difference


@triton.jit
def load_bits(
    rows, k, in_features, ONE: tl.constexpr,
    FIELD: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Fields or-ed into the 16 bits of ONE, int16 [BN, BK]; at most 4 bits."""
    TWICE: tl.constexpr = ONE * 0x10001
    if FIELD == 4:
        v = _load(rows, k // 2, tl.cdiv(in_features, 2), BLOCK_K // 2, EVEN_K).to(tl.int32) & 0xFF
        low, high = _halves((v | (v << 12)) & 0x000F000F | TWICE)
        bits = tl.join(low, high)
    else:
        v = _load(rows, k // 4, tl.cdiv(in_features, 4), BLOCK_K // 4, EVEN_K).to(tl.int32) & 0xFF
        first, second = (v | (v << 14)) & 0x00030003 | TWICE, ((v >> 4) | (v << 10)) & 0x00030003 | TWICE
        if FIELD == 3:
            high = _load_high(rows, k, in_features, BLOCK_K, EVEN_K).to(tl.int32) & 0xFF
            first |= ((high << 2) | (high << 17)) & 0x00040004
            second |= (high | (high << 15)) & 0x00040004
        f0, f1 = _halves(first)
        f2, f3 = _halves(second)
        bits = tl.join(tl.join(f0, f2), tl.join(f1, f3))
    return tl.reshape(bits, (v.shape[0], BLOCK_K))


@triton.jit
def _load_high(rows, k, in_features, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """High bits of the 3-bit format, four a number: int8 [BN, BK / 4]."""
    plane = rows + tl.cdiv(in_features, 4)
    stored = _load(plane, k // 8, tl.cdiv(in_features, 8), BLOCK_K // 8, EVEN_K)
    return tl.reshape(tl.join(stored & 15, (stored >> 4) & 15), (stored.shape[0], BLOCK_K // 4))


@triton.jit
def _load(rows, first, limit, COUNT: tl.constexpr, EVEN: tl.constexpr):
    """COUNT bytes of each row from `first` on, int8; the row, or its plane, has `limit` of them."""
    at = first + tl.arange(0, COUNT)
    return tl.load(rows + at[None, :]) if EVEN else tl.load(rows + at[None, :], mask=(at < limit)[None, :], other=0)


@triton.jit
def _load_pairs(rows, first, limit, COUNT: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr):
    """COUNT pairs of bytes of each row from pair `first` on, int32 below 2^16. ALIGNED: rows lie on even addresses."""
    at = first + tl.arange(0, COUNT)[None, :]
    if ALIGNED:
        pairs = rows.to(tl.pointer_type(tl.int16)) + at
        stored = tl.load(pairs) if EVEN else tl.load(pairs, mask=at < limit // 2, other=0)
        stored = stored.to(tl.int32)
    else:
        low = tl.load(rows + 2 * at, mask=2 * at < limit, other=0)
        high = tl.load(rows + 2 * at + 1, mask=2 * at + 1 < limit, other=0)
        stored = (low.to(tl.int32) & 0xFF) | (high.to(tl.int32) << 8)
    return stored & 0xFFFF


@triton.jit
def _halves(pair):
    """The low and the high 16 bits of int32, as int16."""
    return (pair & 0xFFFF).to(tl.int16), (pair >> 16).to(tl.int16)
