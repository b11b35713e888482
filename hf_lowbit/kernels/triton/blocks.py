"""Registers the block-sparse kernels for CUDA devices; triton is imported by the first product on one."""

from __future__ import annotations

import torch
from torch import Tensor

from ...functional.block_dispatch import BlockKernel, BlockProblem, register_blocks
from . import DTYPES, NAME, refuse_machine


def refuse(problem: BlockProblem) -> str | None:
    """None, or why no Triton kernel can serve a product with live blocks."""
    if problem.device != "cuda":
        return f"the weight is on {problem.device}"
    if problem.bits is not None:
        return f"no code for {problem.bits}-bit live blocks: they become numbers for each product"
    if problem.dtype not in DTYPES:
        return f"no code for {problem.dtype}"
    return refuse_machine()


def run(
    x: Tensor,
    values: Tensor,
    col_indices: Tensor,
    row_pointers: Tensor | None,
    problem: BlockProblem,
    scale: Tensor | None = None,
) -> Tensor:
    """As `BlockKernel.run` says."""
    from .block_launch import product

    # a launch goes to the current device, which need not be that of the tensors
    with torch.cuda.device(x.device):
        return product(x, values, col_indices, row_pointers, problem)


def swiglu(
    x: Tensor, gate: Tensor, up: Tensor, col_indices: Tensor, row_pointers: Tensor | None, problem: BlockProblem
) -> Tensor:
    """As `BlockKernel.swiglu` says."""
    from .block_launch import product

    with torch.cuda.device(x.device):
        return product(x, gate, col_indices, row_pointers, problem, up)


def gradient(
    gradient: Tensor, x: Tensor, col_indices: Tensor, row_pointers: Tensor | None, problem: BlockProblem
) -> Tensor:
    """As `BlockKernel.gradient` says."""
    from .block_launch import gradient as launch

    with torch.cuda.device(x.device):
        return launch(gradient, x, col_indices, row_pointers, problem)


register_blocks(BlockKernel(NAME, 400, refuse, run, gradient, swiglu))
