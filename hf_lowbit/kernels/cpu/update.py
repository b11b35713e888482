"""The update of direct training by the C library (csrc/update.h), bit for bit that of torch's operations."""

from __future__ import annotations

import ctypes
import sys
from functools import partial

import torch
from torch import Tensor

from ...functional.grid import grid_of
from ...functional.moments import blocks_of
from ...functional.packing import row_bytes
from ...functional.update import Step, Update, UpdateKernel, Weight, register_update
from . import library
from .record import TIERS, TYPES, refuse_tier


RULES = {"adamw": 0, "lion": 1, "sgd": 2}
# counts of levels are summed in 32 bits, a group of a row at a time
MOST_COLUMNS = 1 << 22


def refuse(name: str, update: Update) -> str | None:
    """Why the tier `name` can't serve, or None."""
    if update.device != "cpu":
        return f"the weight is on {update.device}"
    if update.rule not in RULES:
        return "no code for this optimizer: it needs the whole matrix before a weight can move"
    if update.grad_dtype not in TYPES or update.scale_dtype not in TYPES:
        return f"no code for {update.grad_dtype} gradients with {update.scale_dtype} scales"
    if not 0 < update.columns <= MOST_COLUMNS or update.rows == 0:
        return f"no code for {update.rows} rows of {update.columns} weights"
    if sys.byteorder != "little":
        return "fields are spread as little-endian integers"
    return refuse_tier(name)


def _run(
    tier: int, update: Update, weight: Weight, grad: Tensor, states: dict[str, Tensor], step: Step
) -> tuple[int, float]:
    grid, constants, columns = grid_of(update.bits), step.constants, update.columns
    # named, so that a copy outlives the call
    scale = weight.scale.contiguous()
    zero_point = None if weight.zero_point is None else weight.zero_point.contiguous()
    if not weight.stored.is_contiguous() or not all(states[name].is_contiguous() for name in states if name != "t"):
        raise ValueError("the weight's bytes and its states are overwritten in place, and must be contiguous.")
    group = columns if update.group_size is None else min(update.group_size, columns)
    blocks = blocks_of(columns, update.state_bits) if update.state_bits in (8, 4) else None
    record = library.UpdateRecord(
        field=grid.field_bits, offset=-grid.qmin, qmin=grid.qmin, qmax=grid.qmax, group=group,
        scale_stride=0 if scale.shape[0] == 1 else scale.shape[1], scale_type=TYPES[scale.dtype],
        rows=update.rows, columns=columns, row_bytes=row_bytes(columns, grid),
        grad_type=TYPES[grad.dtype], grad_row=grad.stride(0), grad_column=grad.stride(1),
        rule=RULES[constants.rule], first=constants.first, nesterov=constants.nesterov,
        state_bits=update.state_bits, blocks=blocks.count if blocks else 0, width=blocks.width if blocks else 0,
        state_row=states["m"].shape[1], row_key=step.key.rows, column_key=step.key.columns,
        threads=torch.get_num_threads(),
        beta1=constants.beta1, rest1=constants.rest1, beta2=constants.beta2, rest2=constants.rest2,
        eps=constants.eps, factor=constants.factor, rate=step.rate, decay=step.decay,
        stored=weight.stored.data_ptr(), scale=scale.data_ptr(),
        zero=None if zero_point is None else zero_point.data_ptr(), grad=grad.data_ptr(),
        **_moment("m", states, True), **_moment("v", states, False),
    )  # fmt: skip
    if library.load().update(ctypes.addressof(record), tier):
        raise MemoryError(f"no memory for the scratch of an update of {update.rows} rows of {columns} weights.")
    return record.changed, float(record.levels)


def _moment(name: str, states: dict[str, Tensor], signed: bool) -> dict:
    codes, base = states.get(name), states.get(f"{name}_base")
    return {
        f"{name}_codes": None if codes is None else codes.data_ptr(),
        f"{name}_base": None if base is None else base.data_ptr(),
        f"{name}_signed": signed,
    }


for _name, (_tier, _rank, _) in TIERS.items():
    # any compiled loop beats dozens of passes of torch: the plain one too
    register_update(UpdateKernel(_name, _rank, partial(refuse, _name), partial(_run, _tier)))
