"""Kernels around single device functions, for tests that look inside; importing this needs triton."""

import triton
import triton.language as tl

from hf_lowbit.kernels.triton.fields import load_bits


@triton.jit
def bits_kernel(weight, out, width, FIELD: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """`load_bits` of one row of `width` codes, int16."""
    rows = weight + tl.zeros((1, 1), tl.int64)
    ks = tl.arange(0, BLOCK)[None, :]
    tl.store(out + ks, load_bits(rows, 0, width, ONE, FIELD, BLOCK, False), mask=ks < width)
