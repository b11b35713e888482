"""Fields of b bits in a row of int32 words, least significant first: field n begins at bit n b of the row, and may
begin in one word and end in the next. GPTQ and compressed-tensors both store integers so, at every width.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor


# fields that are read at a time: the indices take eight bytes each
CHUNK = 1 << 22


def word_count(fields: int, bits: int) -> int:
    """int32 words that hold `fields` fields."""
    return -(-fields * bits // 32)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` fields of each row: int32 [R, W] -> uint8 [R, count]. `bits` is 1 to 8."""
    if words.dtype != torch.int32 or words.ndim != 2 or words.shape[1] != word_count(count, bits):
        raise ValueError(
            f"Expected int32 [rows, {word_count(count, bits)}] for {count} fields of {bits} bits. Got {words.dtype} "
            f"{list(words.shape)}."
        )
    if sys.byteorder != "little":
        raise NotImplementedError("packed words are read on little-endian machines only.")
    # one byte more, so that every field lies within two bytes of its row
    stored = F.pad(words.contiguous().view(torch.uint8), (0, 1)).to(torch.int16)
    start = torch.arange(count) * bits
    byte, shift = start // 8, (start % 8).to(torch.int16)
    out = torch.empty(words.shape[0], count, dtype=torch.uint8)
    step = max(1, CHUNK // max(count, 1))
    for first in range(0, words.shape[0], step):
        part = stored[first : first + step]
        # 15 bits at most: a field that begins in the last bit of a byte ends in the seventh of the next
        pairs = part[:, byte] | (part[:, byte + 1] & 0x7F) << 8
        out[first : first + step] = (pairs >> shift & ((1 << bits) - 1)).to(torch.uint8)
    return out
