"""Which code makes one update of a packed weight: a fused kernel in one pass, or torch operation by operation.

The definition is `training/step.py` over `directions`, `moments`, `noise` and `stochastic`: about sixty passes over a
chunk. A kernel does the same in one pass over the weight, in place, and gives the same bits: every operation on floats
rounds once and in the same order, and everything else is integers. So which one runs can't be seen in a training run,
except by its speed; and a run may be resumed on another machine.

Choosing is as for `rows`: the first kernel in order of rank that accepts, none where all refuse; `explain_update` says
why. A forced kernel (`dispatch.use_kernel`) is taken alone; "reference" is torch.

Adafactor has no kernel: its factored moments need sums over the whole matrix before any weight can move, and its step
the norm of the weight, so one pass can't do it.

Shape legend: N rows of the weight, K in_features, R bytes a row, G groups a row, B blocks of a state's row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .directions import Constants
from .dispatch import forced_kernel
from .noise import Key


class Update(NamedTuple):
    """What a kernel may look at to accept or refuse; hashable. `rule` is None for one that no kernel has."""

    rule: str | None
    state_bits: int
    bits: str | int
    group_size: int | None
    rows: int
    columns: int
    grad_dtype: torch.dtype
    scale_dtype: torch.dtype
    device: str


class Weight(NamedTuple):
    """stored int8 [N, R], which the kernel overwrites; scale and zero_point [N, G], [N, 1] or [1, 1]."""

    stored: Tensor
    scale: Tensor
    zero_point: Tensor | None


class Step(NamedTuple):
    """The constants of the rule; the noise's key; `rate` multiplies the direction, `decay` the weight."""

    constants: Constants
    key: Key
    rate: float
    decay: float


class UpdateKernel(NamedTuple):
    """One implementation. `refuse(update)` returns None to accept or a sentence that says why not.

    `run(update, weight, grad, states, step)` gets grad [N, K] with any strides and the states' tensors (`m`, `m_base`,
    `v`, `v_base`; see training/states.py), overwrites the weight's bytes and the states, and returns the number of
    codes that changed and the sum of the levels asked for, each at most the span of the grid.
    """

    name: str
    rank: int
    refuse: Callable[[Update], str | None]
    run: Callable[[Update, Weight, Tensor, dict[str, Tensor], Step], tuple[int, float]]


_kernels: list[UpdateKernel] = []
_choices: dict[tuple, UpdateKernel | None] = {}


def register_update(kernel: UpdateKernel) -> None:
    """Add an implementation, or replace the one of the same name."""
    _kernels[:] = sorted([k for k in _kernels if k.name != kernel.name] + [kernel], key=lambda k: -k.rank)
    _choices.clear()


def choose_update(update: Update) -> UpdateKernel | None:
    """The kernel that runs; None for torch."""
    key = update, forced_kernel()
    if key not in _choices:
        named = [k for k in _kernels if k.name == key[1]] if key[1] else _kernels
        _choices[key] = next((k for k in named if k.refuse(update) is None), None)
    return _choices[key]


def explain_update(update: Update) -> list[tuple[str, str]]:
    """(kernel, why not) in the order they are tried; the reason is empty for the one that runs. Ends with torch, where
    no kernel does."""
    reasons = []
    for kernel in _kernels:
        reasons.append((kernel.name, kernel.refuse(update) or ""))
        if not reasons[-1][1]:
            return reasons
    return [*reasons, ("torch", "")]
