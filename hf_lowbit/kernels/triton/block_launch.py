"""Launches of the block-sparse kernels (block_tiles.py): tile shapes, constants, memory.

Nothing here waits for the device. Shapes follow from sizes alone: no GPU has timed them yet.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...functional.block_dispatch import BlockProblem
from ...functional.blocks import rows_of_blocks
from .block_tiles import gradient_kernel, product_kernel


# Triton reads the variable at import, as we do here; its interpreter runs kernels on the CPU, for tests
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
# shared memory that all devices with the needed instructions have for one program, less a little
SHARED_BYTES = 96 * 1024
# a side of a product instruction is no smaller
LEAST = 16
MOST_STAGES = 4


class BlockPlan(NamedTuple):
    """Rows of x, of a block and columns of a block in a tile, and steps whose copies are under way at once."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int = 4


def product_plan(problem: BlockProblem, weights: int = 1) -> BlockPlan:
    """The tile of a product; `weights`: 2 for a fused SwiGLU."""
    size = problem.dtype.itemsize
    block_m = min(64, max(LEAST, triton.next_power_of_2(problem.rows)))
    block_n = min(64, max(LEAST, triton.next_power_of_2(problem.height)))
    block_k = max(LEAST, triton.next_power_of_2(problem.width))
    while block_m > LEAST and 2 * size * block_k * (block_m + weights * block_n) > SHARED_BYTES:
        block_m //= 2
    while block_n > LEAST and 2 * size * block_k * (block_m + weights * block_n) > SHARED_BYTES:
        block_n //= 2
    stages = SHARED_BYTES // (size * block_k * (block_m + weights * block_n))
    return BlockPlan(block_m, block_n, block_k, max(2, min(stages, MOST_STAGES)))


def gradient_plan(problem: BlockProblem) -> BlockPlan:
    """The tile of the gradient of blocks; `block_m` is its step along M."""
    size = problem.dtype.itemsize
    block_n = min(64, max(LEAST, triton.next_power_of_2(problem.height)))
    block_k = max(LEAST, triton.next_power_of_2(problem.width))
    block_m = 64 if size == 2 else 32
    stages = SHARED_BYTES // (size * block_m * (block_n + block_k))
    # four warps do not have the registers for so many sums and three products of each
    warps = 8 if size == 4 and block_n * block_k > 4096 else 4
    return BlockPlan(block_m, block_n, block_k, max(2, min(stages, MOST_STAGES)), warps)


def constants_of(problem: BlockProblem, plan: BlockPlan, upcast: bool = False) -> dict:
    """What both kernels are compiled for."""
    even = plan.block_k == problem.width and problem.height % plan.block_n == 0
    return {
        "HEIGHT": problem.height, "WIDTH": problem.width, "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k, "EVEN": even and problem.in_features % problem.width == 0,
        "PRECISION": "tf32x3" if problem.dtype == torch.float32 else "ieee", "UPCAST": upcast,
    }  # fmt: skip


def product(
    x: Tensor,
    values: Tensor,
    columns: Tensor,
    pointers: Tensor | None,
    problem: BlockProblem,
    second: Tensor | None = None,
    plan: BlockPlan | None = None,
) -> Tensor:
    """y [M, NB * bn] in x's dtype; with `second`, silu(x values^T) * (x second^T)."""
    upcast = INTERPRETED and x.dtype == torch.bfloat16
    # the interpreter rounds to bfloat16 by cutting
    out = torch.float32 if upcast else x.dtype
    y = torch.empty(problem.rows, problem.block_rows * problem.height, dtype=out, device=x.device)
    if y.numel():
        plan = plan or product_plan(problem, 1 if second is None else 2)
        x = x if x.stride(1) == 1 else x.contiguous()
        live = 0 if pointers is not None else values.shape[1]
        grid = triton.cdiv(problem.rows, plan.block_m), problem.block_rows * triton.cdiv(problem.height, plan.block_n)
        product_kernel[grid](
            x, values, values if second is None else second, columns, columns if pointers is None else pointers, y,
            problem.rows, problem.in_features, problem.block_rows, live, _stride(x),
            HAS_POINTERS=pointers is not None, SWIGLU=second is not None, **constants_of(problem, plan, upcast),
            num_warps=plan.warps, num_stages=plan.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return y.to(x.dtype)


def gradient(
    gradient: Tensor,
    x: Tensor,
    columns: Tensor,
    pointers: Tensor | None,
    problem: BlockProblem,
    plan: BlockPlan | None = None,
) -> Tensor:
    """dV [..., bn, bk] in x's dtype, of the shape of `columns` and a block."""
    upcast = INTERPRETED and x.dtype == torch.bfloat16
    shape = *columns.shape, problem.height, problem.width
    out = torch.empty(shape, dtype=torch.float32 if upcast else x.dtype, device=x.device)
    if out.numel():
        plan = plan or gradient_plan(problem)
        x, gradient = (t if t.stride(1) == 1 else t.contiguous() for t in (x, gradient))
        # `rows_of_blocks` only looks at the number of blocks a row
        rows = rows_of_blocks(out, pointers).int()
        gradient_kernel[(columns.numel() * triton.cdiv(problem.height, plan.block_n),)](
            gradient, x, rows, columns, out, problem.rows, problem.in_features, _stride(gradient), _stride(x),
            **constants_of(problem, plan, upcast), num_warps=plan.warps, num_stages=plan.stages,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out.to(x.dtype)


def _stride(x: Tensor) -> int:
    # one row has no distance to the next: torch may give any number
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]
