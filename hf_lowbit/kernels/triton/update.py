"""The update of direct training on CUDA devices (`update_kernel.py`). This file registers it, without triton.

Tested for equal bits in Triton's interpreter and compiled ahead for sm_90; on a device it has not run yet, so its
speed is not known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...functional.grid import grid_of
from ...functional.moments import blocks_of
from ...functional.packing import row_bytes
from ...functional.update import Step, Update, UpdateKernel, Weight, register_update
from . import NAME, refuse_machine


RULES = ("adamw", "lion", "sgd")
# columns a program takes where states have no blocks of their own
WIDTH = 256
# fields of eight columns are whole bytes at every width
BYTES = 8


def refuse(update: Update) -> str | None:
    """None, or why the kernel can't make an update."""
    if update.device != "cuda":
        return f"the weight is on {update.device}"
    return refuse_update(update) or refuse_machine()


def refuse_update(update: Update) -> str | None:
    """None, or what of the update itself the kernel can't do, whatever the device."""
    if update.rule not in RULES:
        return "no code for this optimizer: it needs the whole matrix before a weight can move"
    if update.columns == 0 or update.rows == 0:
        return f"there is nothing to move in {update.rows} rows of {update.columns} weights"
    if update.grad_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"no code for {update.grad_dtype} gradients"
    width = width_of(update)
    if update.columns % BYTES or width % BYTES:
        return f"blocks of {width} of {update.columns} columns share bytes; the kernel needs multiples of {BYTES}"
    return None


def width_of(update: Update) -> int:
    """Columns a program works on: a block of the states."""
    return blocks_of(update.columns, update.state_bits).width if update.state_bits in (8, 4) else WIDTH


def constants_of(update: Update, step: Step, has_zero: bool) -> dict:
    """What the kernel is compiled for."""
    grid, width = grid_of(update.bits), width_of(update)
    return {
        "FIELD": grid.field_bits, "QMIN": grid.qmin, "QMAX": grid.qmax, "STATE_BITS": update.state_bits,
        "RULE": step.constants.rule, "FIRST": step.constants.first, "NESTEROV": step.constants.nesterov,
        "HAS_ZERO": has_zero, "BLOCK": 1 << (width - 1).bit_length(),
    }  # fmt: skip


def launch(update: Update, weight: Weight, grad: Tensor, states: dict[str, Tensor], step: Step) -> tuple[int, float]:
    """Make one update, as `UpdateKernel.run` asks."""
    from .update_kernel import update_kernel

    grid, c, columns, width = grid_of(update.bits), step.constants, update.columns, width_of(update)
    scale = weight.scale.contiguous()
    zero_point = None if weight.zero_point is None else weight.zero_point.contiguous()
    counts = torch.zeros(2, dtype=torch.int64, device=grad.device)
    blocks = -(-columns // width)
    group = columns if update.group_size is None else update.group_size
    update_kernel[(update.rows, blocks)](
        weight.stored, scale, zero_point, grad,
        states["m"], states.get("m_base"), states.get("v"), states.get("v_base"), counts,
        columns, row_bytes(columns, grid), grad.stride(0), grad.stride(1), width, blocks, states["m"].shape[1], group,
        0 if scale.shape[0] == 1 else scale.shape[1], step.key.rows, step.key.columns,
        c.beta1, c.rest1, c.beta2, c.rest2, c.eps, c.factor, step.rate, step.decay,
        **constants_of(update, step, zero_point is not None), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    changed, levels = counts.tolist()
    return changed, float(levels)


def run(update: Update, weight: Weight, grad: Tensor, states: dict[str, Tensor], step: Step) -> tuple[int, float]:
    """`launch` on the weight's device, which need not be the current one."""
    with torch.cuda.device(grad.device):
        return launch(update, weight, grad, states, step)


register_update(UpdateKernel(NAME, 400, refuse, run))
