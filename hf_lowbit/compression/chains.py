"""Blocks of a model that run one after the other, and entering each of them again with what it was called with.

A chain is a stack (`calls.py`), such as `model.layers`. One forward of the whole model records how each
block is called: its arguments, with a mark where the hidden states stand that the block before gave. A block is then
entered with other hidden states without the rest of the model. Nothing about an architecture is assumed: where blocks
don't follow each other, or where one entered again gives another output, there is no record, and the caller uses
forwards of the whole model instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .calls import find_stacks, first, forward


@dataclass
class Chain:
    """`name` of the list; (name, module) of its blocks in order."""

    name: str
    blocks: list[tuple[str, nn.Module]]


class _Hidden:
    """Stands where a block's hidden states stood among its arguments."""


HIDDEN = _Hidden()


@dataclass
class Recording:
    """One batch: the first block's hidden states, and the arguments of every block."""

    hidden: Tensor
    calls: list[tuple[tuple, dict]]

    def enter(self, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
        """Output hidden states of `block` called as block `index` was, on `hidden`."""
        args, kwargs = self.calls[index]
        args = tuple(hidden if a is HIDDEN else a for a in args)
        kwargs = {name: hidden if a is HIDDEN else a for name, a in kwargs.items()}
        return first(block(*args, **kwargs))


def find_chains(model: nn.Module) -> list[Chain]:
    """The stacks whose members are distinct, have modules of their own, and hold linear weights."""

    def holds(stack: nn.ModuleList) -> bool:
        distinct = len({id(child) for child in stack}) == len(stack)
        weights = any(p.ndim >= 2 for p in stack[0].parameters())
        return distinct and weights and next(stack[0].children(), None) is not None

    stacks = find_stacks(model, holds)
    return [Chain(name, [(f"{name}.{i}", block) for i, block in enumerate(stack)]) for name, stack in stacks]


@contextmanager
def _hooks(handles: list) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record(model: nn.Module, chain: Chain, batches: list[dict]) -> list[Recording] | None:
    """Run the model on each batch; None when the chain can't be entered again."""
    recordings = []
    for number, batch in enumerate(batches):
        order, inputs, outputs = [], [], []

        def before(index, module, args, kwargs, order=order, inputs=inputs):
            order.append(index)
            inputs.append((args, kwargs))

        def after(module, args, output, outputs=outputs):
            outputs.append(first(output))

        handles = []
        for index, (_, block) in enumerate(chain.blocks):
            handles.append(block.register_forward_pre_hook(
                lambda m, a, k, index=index: before(index, m, a, k), with_kwargs=True))  # fmt: skip
            handles.append(block.register_forward_hook(after))
        with _hooks(handles):
            forward(model, batch)
        if order != list(range(len(chain.blocks))) or not all(isinstance(o, Tensor) for o in outputs):
            return None
        start = next((v for v in (*inputs[0][0], *inputs[0][1].values()) if _is_hidden(v, outputs[0])), None)
        if start is None:
            return None
        calls, hidden = [], start
        for (args, kwargs), output in zip(inputs, outputs, strict=True):
            marked = tuple(HIDDEN if a is hidden else a for a in args)
            named = {name: HIDDEN if a is hidden else a for name, a in kwargs.items()}
            if sum(a is HIDDEN for a in (*marked, *named.values())) != 1:
                return None
            calls.append((marked, named))
            hidden = output
        recording = Recording(start, calls)
        if number == 0:
            again = recording.enter(0, chain.blocks[0][1], start)
            if not torch.allclose(again, outputs[0], rtol=1e-3, atol=1e-3 * float(outputs[0].abs().max())):
                return None
        recordings.append(recording)
    return recordings


def _is_hidden(value, output: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == output.shape and value.is_floating_point()
