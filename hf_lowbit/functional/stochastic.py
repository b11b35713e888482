"""Stochastic rounding of an update in delta form: the step, measured in grid units, moves a code by whole levels.

    d = -lr * u / s,    n = sign(d) * ceil(|d| - r),    q' = clamp(q + n, qmin, qmax),    r uniform on [0, 1)

so E[n] = d exactly, n = 0 when d = 0, and |n - d| < 1 (stochastic rounding: Zhao et al. 2024, "Direct Quantized
Training of Language Models with Stochastic Rounding", section 3; Gupta et al. 2015). sign(d) * ceil(|d| - r) is
floor(d + r') with another uniform r', written so that a small d needs no bits that float32 does not have: |d| - r has
the right sign whatever their size, and the two signs of d are treated alike.

How this differs from the released code of the paper: that adds the step to a float weight in the parameter's dtype and
rounds the sum on a grid whose scale is derived anew from the weights. In bfloat16 the sum swallows steps below a tenth
of a level before they are rounded, and a new scale moves every code of the tensor. Here the float weight is never
built, and the scale is fixed or learned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grid import Grid


def round_step(step: Tensor, noise: Tensor) -> Tensor:
    """Whole levels to move: float32, with mean `step` (float32, in grid units). `noise` in [0, 1) of the same
    shape."""
    levels = step.abs().sub_(noise).ceil_()
    return levels.copysign_(step)


def apply_step(codes: Tensor, levels: Tensor, grid: Grid) -> Tensor:
    """Codes int8 moved by `levels` (float32, whole numbers), clamped to the grid."""
    moved = codes.to(torch.float32).add_(levels)
    return moved.clamp_(grid.qmin, grid.qmax).to(torch.int8)
