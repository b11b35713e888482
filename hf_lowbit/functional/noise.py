"""Counter-based noise: a pure function of (seed, step, tensor name, row, column), for stochastic rounding.

    A[r] = mix(r + k0),  B[c] = mix(c + k1),  x[r, c] = mix(A[r] + B[c]),  u = (x mod 2^31) / 2^31

on 32-bit integers that wrap, where `mix` is a full-avalanche hash of two multiplications (the constants are those of
"lowbias32", C. Wellons, "Prospecting for hash functions", public domain) and k0, k1 are words of BLAKE2b(seed, step,
name). So every element of every tensor at every step has noise of its own, which depends on nothing else: not on the
number of threads, chunks or processes, not on what was drawn before, and not on torch's generators. That alone gives
bit-exact resume and identical replicas. (A generator of each rank's own let two thirds of the packed bytes differ
after five steps, unnoticed.)

Rows and columns are those of the whole tensor, so a shard of it draws the noise that the whole would.

u is converted to float32 by rounding: small values keep all their 31 bits, so that u < p has the probability p down to
2^-31. The two hashes of the rows and columns are vectors; per element one addition and one `mix` are left.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor


# int32 halves of lowbias32's multipliers
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
# a third multiplication draws a second, independent word where states are rounded too
THIRD = 0x31848BAB
# the float32 below 2^-31: the largest words are rounded up to 2^31, and u must stay below 1
UNIT = 2.0**-31 * (1 - 2.0**-24)


class Key(NamedTuple):
    """Two int32 words that belong to one tensor at one step."""

    rows: int
    columns: int


def key_of(seed: int, step: int, name: str) -> Key:
    """The key of the tensor `name` at `step` (an integer from 0 on) under `seed` (any integer)."""
    digest = hashlib.blake2b(f"{seed}:{step}:{name}".encode(), digest_size=8).digest()
    words = (int.from_bytes(digest[start : start + 4], "little", signed=True) for start in (0, 4))
    return Key(*words)


def shifted(key: Key, first: int) -> Key:
    """The key of the rows from `first` on as a tensor of their own: its row 0 has the noise of row `first`."""
    rows = (key.rows + first) & 0xFFFFFFFF
    return Key(rows - (1 << 32) if rows >= 1 << 31 else rows, key.columns)


def row_words(key: Key, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
    """A for the rows start..stop: int32 [stop - start, 1]."""
    return _mix(_counter(start, stop, key.rows, device)).unsqueeze(1)


def column_words(key: Key, columns: int, device: torch.device | str = "cpu") -> Tensor:
    """B for all columns: int32 [1, columns]."""
    return _mix(_counter(0, columns, key.columns, device)).unsqueeze(0)


def words(rows: Tensor, columns: Tensor) -> Tensor:
    """x for the rows and columns whose words are given: int32 [R, K], uniform on all 2^32 values."""
    return _mix(rows + columns)


def more_words(x: Tensor) -> Tensor:
    """A second word for each element, for another use than the first's. `x` is left as it is."""
    x = x * THIRD
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))


def uniform(x: Tensor) -> Tensor:
    """u float32 in [0, 1] of words: (x mod 2^31) / 2^31, rounded to float32."""
    return (x & 0x7FFFFFFF).to(torch.float32).mul_(UNIT)


def _counter(start: int, stop: int, offset: int, device) -> Tensor:
    # added in 64 bits and cut to 32, since an int32 range may not wrap
    return (torch.arange(start, stop, dtype=torch.int64, device=device) + offset).to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """lowbias32, in place on a fresh tensor. Shifts of signed integers copy the sign: the masks take it out."""
    shifted = x >> 16
    x.bitwise_xor_(shifted.bitwise_and_(0xFFFF)).mul_(FIRST)
    torch.bitwise_right_shift(x, 15, out=shifted)
    x.bitwise_xor_(shifted.bitwise_and_(0x1FFFF)).mul_(SECOND)
    torch.bitwise_right_shift(x, 16, out=shifted)
    return x.bitwise_xor_(shifted.bitwise_and_(0xFFFF))
