"""Sharing out gradients in the backward pass: as soon as a weight has its gradient, each process keeps its own rows of
the mean and drops the rest.

Processes must reduce the same weights in the same order, or they would add up gradients of different ones. So the
order is fixed (last weights first, as the backward pass goes); a gradient that comes early waits for its turn, and
what has none at the end of the backward pass counts as zeros, in case another process has one. A weight that no
process used keeps what it had, as without sharing.

Gradients of several backward passes are added after they are averaged, so whole gradients never add up in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.weak import WeakIdKeyDictionary

from .leaves import Leaf
from .shards import RowGradient, Shards


# where DDP looks for the names of what it shall not touch
IGNORED = "_ddp_params_and_buffers_to_ignore"
# the reducer of a weight: one that an aborted run left must not reduce what another has reduced
_reducers: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass
class _Pass:
    """One backward pass: weights that had a gradient, how many were reduced, gradients that wait for their turn."""

    used: set[int] = field(default_factory=set)
    done: int = 0
    waiting: dict[int, Tensor] = field(default_factory=dict)


class Reducer:
    """Leaves a `RowGradient` in the `grad` of each leaf's parameter after every backward pass, until `close`."""

    def __init__(self, leaves: list[Leaf], shards: Shards):
        close_reducers(leaf.parameter for leaf in leaves)
        self.leaves, self.shards = leaves[::-1], shards
        self._passes: dict[int, _Pass] = {}
        # while a new gradient is added, what earlier backward passes left
        self._earlier: dict[int, RowGradient] = {}
        self._handles = []
        for index, leaf in enumerate(self.leaves):
            parameter = leaf.parameter
            _reducers[parameter] = self
            self._handles += [
                parameter.register_hook(lambda grad, index=index: self._before(index)),
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._after(index)),
            ]

    def close(self) -> None:
        """Leave the gradients alone from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for leaf in self.leaves:
            _reducers.pop(leaf.parameter, None)

    def _pass(self) -> _Pass:
        """The backward pass that runs; one within another, as of reentrant checkpointing, is one of its own."""
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            self._passes[task] = _Pass()
            Variable._execution_engine.queue_callback(lambda: self._finish(self._passes.pop(task)))
        return self._passes[task]

    def _before(self, index: int) -> None:
        """The gradient of a weight is about to be added to what its `grad` holds."""
        parameter = self.leaves[index].parameter
        if isinstance(parameter.grad, RowGradient):
            self._earlier[index], parameter.grad = parameter.grad, None

    def _after(self, index: int) -> None:
        current, leaf = self._pass(), self.leaves[index]
        current.used.add(index)
        # the whole gradient is no longer the parameter's: another pass, within this one, may come between
        current.waiting[index], leaf.parameter.grad = leaf.gradient(), self._earlier.pop(index, None)
        while current.done in current.waiting:
            self._reduce(current.done, current.waiting.pop(current.done))
            current.done += 1

    @torch.no_grad()
    def _reduce(self, index: int, matrix: Tensor) -> None:
        parameter = self.leaves[index].parameter
        part = self.shards.scatter_mean(matrix)
        if parameter.grad is None:
            parameter.grad = RowGradient(part, self.shards, parameter.shape)
        else:
            parameter.grad.local.add_(part)

    @torch.no_grad()
    def _finish(self, current: _Pass) -> None:
        count, had_none = len(self.leaves), []
        for index in range(current.done, count):
            matrix, leaf = current.waiting.pop(index, None), self.leaves[index]
            if matrix is None:
                matrix = leaf.parameter.new_zeros(leaf.all_rows, leaf.columns)
                had_none += [index] if leaf.parameter.grad is None else []
            self._reduce(index, matrix)
        device = self.leaves[0].parameter.device
        used = self.shards.sum(torch.tensor([int(index in current.used) for index in range(count)], device=device))
        for index in had_none:
            if not used[index]:
                self.leaves[index].parameter.grad = None


def leave_out_of_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Have DDP, which must wrap `model` later, leave the parameters `names` alone, and no others of ours."""
    before, ours = set(getattr(model, IGNORED, ())), set(getattr(model, "_hf_lowbit_left_out", ()))
    names = set(names)
    if names or ours:
        setattr(model, IGNORED, sorted((before - ours) | names))
        model._hf_lowbit_left_out = names


def left_out_of_ddp(model: nn.Module) -> set[str]:
    """The parameters that `leave_out_of_ddp` named."""
    return set(getattr(model, "_hf_lowbit_left_out", ()))


def close_reducers(parameters: Iterable[Tensor]) -> None:
    """Close what an earlier run, perhaps an aborted one, left on these parameters."""
    for parameter in parameters:
        reducer = _reducers.get(parameter)
        if reducer is not None:
            reducer.close()
