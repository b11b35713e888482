"""Products with live blocks by the C library (csrc/lowbit_blocks.c)."""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor

from ...functional.block_dispatch import BlockKernel, BlockProblem, register_blocks
from ...functional.blocks import reference_block_gradient
from ...functional.grid import grid_of
from . import library
from .record import TIERS, TYPES, refuse_tier


def refuse(name: str, problem: BlockProblem) -> str | None:
    """Why the tier `name` can't serve, or None."""
    if problem.device != "cpu":
        return f"the weight is on {problem.device}"
    if problem.dtype not in TYPES:
        return f"no code for {problem.dtype}"
    if name == "cpu-portable":
        # an output at a time: batched products of torch are faster
        return "plain C is slower than torch"
    return refuse_tier(name)


def run(
    tier: int,
    x: Tensor,
    values: Tensor,
    col_indices: Tensor,
    row_pointers: Tensor | None,
    problem: BlockProblem,
    scale: Tensor | None = None,
) -> Tensor:
    """As `BlockKernel.run` says. Sums are float32; bits do not depend on the number of threads."""
    if x.stride(1) != 1 and x.shape[1] > 1:
        x = x.contiguous()
    y = x.new_empty(problem.rows, problem.block_rows * problem.height)
    if not y.numel():
        return y
    field = offset = 0
    if problem.bits is not None:
        grid = grid_of(problem.bits)
        field, offset = grid.field_bits, -grid.qmin
    record = library.BlocksRecord(
        type=TYPES[problem.dtype], block_rows=problem.block_rows, height=problem.height, width=problem.width,
        live=0 if row_pointers is not None else values.shape[1], in_features=problem.in_features, m=problem.rows,
        x_stride=x.stride(0), threads=torch.get_num_threads(), field=field, offset=offset,
        row_bytes=values.shape[-1], int8=problem.int8_activations, x=x.data_ptr(), values=values.data_ptr(),
        scale=None if scale is None else scale.data_ptr(), columns=col_indices.data_ptr(),
        pointers=None if row_pointers is None else row_pointers.data_ptr(), y=y.data_ptr(),
    )  # fmt: skip
    if library.load().block_linear(ctypes.addressof(record), tier):
        raise MemoryError(f"no memory for the scratch of {problem}.")
    return y


def gradient(
    gradient: Tensor, x: Tensor, col_indices: Tensor, row_pointers: Tensor | None, problem: BlockProblem
) -> Tensor:
    """As `BlockKernel.gradient` says: matrix tiles where they fit, else batched products of torch. Sums are float32."""
    height, width = problem.height, problem.width
    if problem.dtype != torch.bfloat16 or height % 16 or width % 16 or not problem.rows or gradient.dtype != x.dtype:
        return reference_block_gradient(gradient, x, col_indices, row_pointers, height, width)
    x, gradient = (t if t.stride(1) == 1 else t.contiguous() for t in (x, gradient))
    out = x.new_empty(*col_indices.shape, height, width)
    record = library.BlockGradientRecord(
        block_rows=problem.block_rows, height=height, width=width,
        live=0 if row_pointers is not None else col_indices.shape[1], in_features=problem.in_features, m=problem.rows,
        x_stride=x.stride(0), dy_stride=gradient.stride(0), threads=torch.get_num_threads(), x=x.data_ptr(),
        dy=gradient.data_ptr(), columns=col_indices.data_ptr(),
        pointers=None if row_pointers is None else row_pointers.data_ptr(), out=out.data_ptr(),
    )  # fmt: skip
    if library.load().block_gradient(ctypes.addressof(record), TIERS["cpu-amx"][0]):
        raise MemoryError(f"no memory for the scratch of the gradient of {problem}.")
    return out


for _name, (_tier, _rank, _) in TIERS.items():
    _gradient = gradient if _name == "cpu-amx" else None
    register_blocks(BlockKernel(_name, _rank, partial(refuse, _name), partial(run, _tier), _gradient))
