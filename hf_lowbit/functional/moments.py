"""Low-bit optimizer states: moments as tiny floats, rounded without bias, a shared exponent a block.

A moment x is kept as the leading bits of its float32 pattern. Of the pattern b = bits(|x|) the last `shift` bits are
dropped after adding `shift` random bits, and what is left counts from the block's own base:

    code = clamp((b + noise) >> shift - base, low, top),    base = max over the block of (b >> shift) - (top - 1)

Between two neighbours the pattern is linear in x, so E[decode(encode(x))] = x inside the range: an average over
thousands of steps keeps moving although each change is far below a level. Rounding to nearest would stop it: with
beta2 = 0.999 a change is 0.1 % of the value and a level is 6 to 12 %.

| bits | kind | layout | levels an octave | range below the block's largest |
|---|---|---|---|---|
| 16 | both | bfloat16, no block | 128 | all of float32 |
| 8 | signed | two's complement | 8 | 2^-16 |
| 8 | positive | 8 bits | 8 | 2^-32 |
| 4 | signed | two's complement | 1 | 2^-7 |
| 4 | positive | 4 bits | 1 | 2^-15 |

Signed moments below the range become 0, so a weight without gradient keeps a first moment of 0 and is never moved.
Positive ones (second moments, which are divided by) become the smallest level instead.

Blocks lie inside rows: a shard of whole rows holds the same states as the whole would. Shape legend: R rows, K
columns, B blocks a row. Block-wise 8-bit states were introduced by Dettmers et al. 2022 ("8-bit Optimizers via
Block-wise Quantization"), with a table and rounding to nearest; 4 bits by Li et al. 2023 ("Memory Efficient
Optimizers with 4-bit States").
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


# elements of a row that share a base, at most
BLOCK = {8: 256, 4: 128}
# (bits, signed) -> (dropped bits of the pattern, largest code)
LAYOUT = {(8, True): (20, 127), (8, False): (20, 255), (4, True): (23, 7), (4, False): (23, 15)}


class Blocks(NamedTuple):
    """How a row of K elements is cut: B blocks of `width`, the last one filled up by `padding`."""

    count: int
    width: int
    padding: int


def blocks_of(columns: int, bits: int) -> Blocks:
    """Equal blocks: as few as cover a row, then as narrow as they can be."""
    count = max(1, -(-columns // BLOCK[bits]))
    width = -(-columns // count)
    return Blocks(count, width, count * width - columns)


def to_bfloat16(x: Tensor, noise: Tensor) -> Tensor:
    """x float32 rounded stochastically to bfloat16; `noise` int32 words, of which 16 bits are used.

    Infinity and the NaN of arithmetic stay what they are.
    """
    bits = (noise & 0xFFFF).add_(x.view(torch.int32))
    return bits.bitwise_and_(-0x10000).view(torch.float32).to(torch.bfloat16)


def encode(x: Tensor, noise: Tensor, bits: int, signed: bool) -> tuple[Tensor, Tensor]:
    """x float32 [R, K] -> codes uint8 [R, K] (4 bits: [R, ceil(K / 2)]) and base int16 [R, B].

    `noise`: int32 words [R, K], of which the low bits are used.
    """
    shift, top = LAYOUT[bits, signed]
    rows, columns = x.shape
    pattern = x.abs().view(torch.int32) if signed else x.view(torch.int32)
    blocks = blocks_of(columns, bits)
    base = (_cut(pattern, blocks).amax(dim=2) >> shift) - (top - 1)
    # a block of zeros: any base will do
    base.clamp_(min=0)
    codes = (noise & ((1 << shift) - 1)).add_(pattern).bitwise_right_shift_(shift)
    codes = _cut(codes, blocks).sub_(base.unsqueeze(2)).clamp_(0 if signed else 1, top)
    codes = codes.reshape(rows, -1)[:, :columns]
    if signed:
        codes = codes.to(torch.float32).copysign_(x)
    # two's complement in one byte: a signed code and a code above 127 alike
    return _pack(codes.to(torch.int16).to(torch.uint8), bits), base.to(torch.int16)


def decode(codes: Tensor, base: Tensor, bits: int, signed: bool, columns: int) -> Tensor:
    """The numbers that `encode` stored: float32 [R, columns]."""
    shift, _ = LAYOUT[bits, signed]
    blocks = blocks_of(columns, bits)
    fields = _unpack(codes, bits, columns, signed)
    level = fields.abs() if signed else fields
    pattern = _cut(level, blocks).add(base.unsqueeze(2)).mul_(1 << shift)
    x = pattern.view(torch.float32).reshape(codes.shape[0], -1)[:, :columns]
    # the sign of level 0 is 0
    return x * fields.clamp_(-1, 1).to(torch.float32) if signed else x.contiguous()


def _cut(x: Tensor, blocks: Blocks) -> Tensor:
    """[R, K] -> [R, B, width]."""
    if blocks.padding:
        x = F.pad(x, (0, blocks.padding))
    return x.reshape(x.shape[0], blocks.count, blocks.width)


def _pack(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    codes = F.pad(codes & 15, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _unpack(stored: Tensor, bits: int, columns: int, signed: bool) -> Tensor:
    """int32 [R, columns]."""
    if bits == 8:
        return (stored.view(torch.int8) if signed else stored).to(torch.int32)
    fields = torch.stack([stored & 15, stored >> 4], dim=2).flatten(1)[:, :columns].to(torch.int32)
    # sign extension of four bits
    return fields.bitwise_xor_(8).sub_(8) if signed else fields
