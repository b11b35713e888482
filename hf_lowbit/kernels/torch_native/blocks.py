"""Dequantize a block of rows that stays in cache, multiply it at once: works for every grid, dtype and number of rows.

Codes are unpacked with shifts and masks on integers that hold several of them, in their own order, so nothing has to
be interleaved: for 4 bits (p | p << 4) & 0x0F0F turns one byte p, widened to int16, into two bytes of one code each.
Scales are applied in float32 and W is rounded once, as in the definition. Without groups the scale s[n] waits for the
result, y[n] = s[n] sum_k x[k] q[n, k]: codes are exact in every dtype, so W is not rounded at all.

Measured, G weights a second in one thread (AVX512, AMD Zen 5): unpacking 20 (4 bits) and 15 (2 bits), int8 to float32
20, group scale 19, float32 to bfloat16 13: 4.3 in all; int8 straight to bfloat16 10. Slower, in all: a table of 256
pairs by index_select 2.6, arithmetic in bfloat16 2.7, batch norm as scale and offset 4.0. Blocks of 2^18 weights lose
a quarter to the fixed cost of each product. A thread keeps up to 8 MB of blocks: new ones at each call would cost more
in clearing pages than all the arithmetic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...functional.dispatch import Problem
from ...functional.grid import grid_of


BLOCK_WEIGHTS = {"cpu": 1 << 20, "cuda": 1 << 24}
_scratch = threading.local()


class Layer(NamedTuple):
    """What describes the weights of one call, as `Kernel.run` gets them; weight [N, R] or [1, N, R]."""

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None
    problem: Problem

    def rows(self) -> Tensor:
        """weight [N, R]."""
        return self.weight.view(self.weight.shape[-2:])


def block_linear(x: Tensor, layer: Layer, bias: Tensor | None) -> Tensor:
    """y = x W^T + bias [M, N] in x's dtype."""
    _, scale, zero_point, problem = layer
    # unscaled sums overflow float16, and 8-bit codes less their zero point an int8
    late = not problem.group_size and x.dtype != torch.float16 and (zero_point is None or problem.bits != 8)
    y = x.new_empty(x.shape[0], problem.out_features)
    if not late:
        for part, dense in dense_blocks(layer, x.dtype):
            y[:, part] = F.linear(x, dense, None if bias is None else bias[part])
        return y
    for part, codes in code_blocks(layer):
        if zero_point is not None:
            # never the stored bytes: 8 bits with a zero point are not late
            codes = codes.sub_(rows_of(zero_point, part))
        y[:, part] = F.linear(x, scratch("dense", codes.shape, x.dtype, x.device).copy_(codes))
    return finish(y, scale, bias, x.dtype)


def finish(y: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y s + bias in float32, rounded once."""
    scaled = y * row_factors(scale)
    return (scaled if bias is None else scaled.add_(bias)).to(dtype).contiguous()


def row_factors(per_row: Tensor) -> Tensor:
    """One value a row of W, [N, 1] or [1, 1], as float32 factors of the columns of y."""
    return per_row.to(torch.float32).view(1, -1)


def rows_of(per_row: Tensor, part: slice) -> Tensor:
    """The rows of `part`; of a value for the whole tensor, the value."""
    return per_row if per_row.shape[0] == 1 else per_row[part]


def code_blocks(layer: Layer) -> Iterator[tuple[slice, Tensor]]:
    """Codes int8 [n, K] of blocks of rows, each valid until the next."""
    weight, problem = layer.rows(), layer.problem
    step = max(1, BLOCK_WEIGHTS[problem.device] // max(problem.in_features, 1))
    for start in range(0, problem.out_features, step):
        part = slice(start, min(start + step, problem.out_features))
        yield part, unpack_fast(weight[part], problem)


def dense_blocks(layer: Layer, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """W [n, K] in `dtype` of blocks of rows, each valid until the next."""
    _, scale, zero_point, problem = layer
    for part, codes in code_blocks(layer):
        exact = scratch("exact", codes.shape, torch.float32, codes.device).copy_(codes)
        if zero_point is not None:
            _each_group(exact, rows_of(zero_point, part).to(torch.float32), problem, Tensor.sub_)
        _each_group(exact, rows_of(scale, part).to(torch.float32), problem, Tensor.mul_)
        if dtype != torch.float32:
            exact = scratch("dense", codes.shape, dtype, codes.device).copy_(exact)
        yield part, exact


def unpack_fast(stored: Tensor, problem: Problem) -> Tensor:
    """`functional.packing.unpack` of bytes int8 [n, R]: codes int8 [n, K], valid until this thread's next call.

    At 8 bits they are the stored bytes themselves.
    """
    width, grid = problem.in_features, grid_of(problem.bits)
    if grid.field_bits == 8:
        return stored
    stored, device = stored.view(torch.uint8), stored.device
    if grid.field_bits == 4:
        pair = scratch("bytes", stored.shape, torch.int16, device).copy_(stored)
        fields = torch.bitwise_left_shift(pair, 4, out=scratch("fields", stored.shape, torch.int16, device))
        fields = fields.bitwise_or_(pair).bitwise_and_(0x0F0F).view(torch.int8)
    else:
        low, high = stored.tensor_split([-(-width // 4)], dim=1)
        # the factors copy a field to where the mask keeps it; the copies don't overlap
        pairs = scratch("fields", low.shape, torch.int32, device).copy_(low).mul_(0x1001).bitwise_and_(0x000F000F)
        fields = pairs.mul_(0x41).bitwise_and_(0x03030303).view(torch.int8)
        if grid.field_bits == 3:
            index = scratch("bytes", high.shape, torch.int32, device).copy_(high).view(-1)
            eights = scratch("eights", index.shape, torch.int64, device)
            torch.index_select(_high_bits(device), 0, index, out=eights)
            fields += eights.view(torch.int8).view(high.shape[0], -1)[:, : fields.shape[1]]
    return fields.add_(grid.qmin)[:, :width]


def scratch(name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor whose memory this thread uses again at the next call with this name and dtype."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    buffers = _scratch.__dict__
    buffer, size = buffers.get((name, dtype)), shape.numel()
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):
            buffer = buffers[name, dtype] = torch.empty(size, dtype=dtype)
    return buffer[:size].view(shape)


@cache
def _high_bits(device: torch.device) -> Tensor:
    """The eight bits of each byte, one after the other as bytes of value 4 or 0: int64 [256]."""
    with torch.inference_mode(False):
        bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
        return (bits * 4).to(torch.int8).view(torch.int64).view(-1).to(device)


def _each_group(dense: Tensor, values: Tensor, problem: Problem, apply: Callable[[Tensor, Tensor], Tensor]) -> None:
    """`apply` one value a group to dense [n, K], in place."""
    size, width = problem.group_size, dense.shape[1]
    if not size or values.shape[1] == 1:
        apply(dense, values)
        return
    whole = width // size
    if whole:
        apply(dense[:, : whole * size].unflatten(1, (whole, size)), values[:, :whole].unsqueeze(2))
    if whole * size < width:
        apply(dense[:, whole * size :], values[:, whole:])
