"""torch's int4 product for few rows: 4 bits a weight are read, whatever the grid.

Its weights are (c - 8) S + Z with c in 0..15, S and Z bfloat16, groups of 32, 64, 128 or 256:

    2 and 3 bits, ternary   c = q - z + 8      S = s      Z = 0
    4 bits                  c = q + 8          S = s      Z = -z s
    8 bits, q = 16 h + l    c = h + 8          S = 16 s   Z = 0              and, beside it, for a second copy of x,
                            c = l              S = s      Z = (8 - z) s

Without groups S is 1 (and 16) and s, float32, multiplies the result. Groups of another size use the largest of torch's
that divides them; one that does not exist means no int4 product. Rounding Z to bfloat16 moves all weights of a group
together: where it does so by more than 2^-8 of their mean size (a 4-bit or 8-bit group far from its zero point), the
layer goes another way. Only bfloat16 inputs: torch multiplies the others one at a time.

Shape legend: C groups of torch's a row, N rows padded to a multiple of 16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...functional.dispatch import Problem
from .blocks import Layer, finish, rows_of, unpack_fast
from .copies import copy_of


HAS_INT4 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and hasattr(
    torch.ops.aten, "_weight_int4pack_mm_for_cpu"
)
SIZES = (256, 128, 64, 32)
FOLDING_TOLERANCE = 2.0**-8
# torch packs multiples of 16 rows; each 64 rows lie together, so that blocks of 512 can be packed one after the other
ROW_MULTIPLE, PACK_ROWS = 16, 512


class Int4Operand(NamedTuple):
    """Codes in torch's order; S and Z [C, N, 2]; the group size; the width of x they expect."""

    packed: Tensor
    scale_and_zero: Tensor
    size: int
    width: int


def int4_linear(x: Tensor, layer: Layer, bias: Tensor | None) -> Tensor | None:
    """y = x W^T + bias in bfloat16, or None where there is no operand (yet)."""
    problem = layer.problem
    operand = copy_of(layer, pack_int4, _most_bytes(problem))
    if operand is None:
        return None
    if operand.width != problem.in_features:
        x = F.pad(x, (0, operand.width - problem.in_features))
    x = torch.cat([x, x], dim=1) if problem.bits == 8 else x.contiguous()
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, operand.packed, operand.size, operand.scale_and_zero)
    if y.shape[1] != problem.out_features:
        y = y[:, : problem.out_features].contiguous()
    if not problem.group_size:
        return finish(y, layer.scale, bias, x.dtype)
    return y if bias is None else (y + bias).to(x.dtype)


def _most_bytes(problem: Problem) -> int:
    """What the operand takes at most: groups of 32, padded."""
    fields = (problem.out_features + ROW_MULTIPLE) * (problem.in_features + SIZES[0])
    return fields * (2 if problem.bits == 8 else 1) * 5 // 8


def pack_int4(layer: Layer) -> Int4Operand | None:
    """The operand of a layer, or None: no fitting group size, or folding its zero points costs too much."""
    problem = layer.problem
    grouped = problem.group_size
    size = next((c for c in SIZES if (grouped or problem.in_features) % c == 0), None if grouped else SIZES[-1])
    if size is None:
        return None
    count = -(-problem.in_features // size)
    packed, scale_and_zero = [], []
    for start in range(0, problem.out_features, PACK_ROWS):
        block = _pack_rows(layer, slice(start, min(start + PACK_ROWS, problem.out_features)), size, count)
        if block is None:
            return None
        packed.append(block[0])
        scale_and_zero.append(block[1])
    return Int4Operand(torch.cat(packed), torch.cat(scale_and_zero, dim=1), size, count * size)


def _pack_rows(layer: Layer, part: slice, size: int, count: int) -> tuple[Tensor, Tensor] | None:
    _, scale, zero_point, problem = layer
    q = unpack_fast(layer.rows()[part], problem).to(torch.int32)
    rows, width = q.shape
    q = F.pad(q, (0, count * size - width))
    # which of our groups each of torch's belongs to
    group_of = torch.arange(count) * size // (problem.group_size or count * size)
    s = torch.ones(rows, count)
    if problem.group_size:
        s *= rows_of(scale, part).to(torch.float32)[:, group_of]
    z = torch.zeros(rows, count, dtype=torch.int32)
    if zero_point is not None:
        z += rows_of(zero_point, part).to(torch.int32)[:, group_of]
    steps = q - z.repeat_interleave(size, dim=1)
    none = torch.zeros_like(s)
    if problem.bits == 8:
        halves = [((q >> 4) + 8, 16 * s, none), (q & 15, s, (8 - z) * s)]
    elif problem.bits == 4:
        halves = [(q + 8, s, -z * s)]
    else:
        halves = [(steps + 8, s, none)]
    folded = halves[-1][2]
    error = (folded.to(torch.bfloat16).to(torch.float32) - folded).abs()
    if bool(error.any()):
        columns = (width - torch.arange(count) * size).clamp_max(size)
        steps[:, width:] = 0
        total = steps.abs().unflatten(1, (count, size)).sum(dim=2) * s
        if bool((error * columns > FOLDING_TOLERANCE * total).any()):
            return None
    below = (0, 0, 0, -rows % ROW_MULTIPLE)
    # columns beyond the width meet zeros of x; any code will do there, as long as it fits
    fields = F.pad(torch.cat([c for c, _, _ in halves], dim=1), below).clamp_(0, 15)
    pairs = torch.cat([torch.stack([F.pad(a, below), F.pad(b, below)], dim=-1) for _, a, b in halves], dim=1)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(fields.contiguous(), 1)
    return packed, pairs.to(torch.bfloat16).transpose(0, 1).contiguous()
