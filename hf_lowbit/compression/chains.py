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


class _Arrived(Exception):
    """The first block was called: nothing behind it is needed."""


def record(model: nn.Module, chain: Chain, batches: list[dict]) -> list[Recording] | None:
    """Run the model on each batch; None when the chain can't be entered again.

    Where all blocks get the very same arguments beside the hidden states, these were made before the first block; of
    further batches only what comes before it is then run.
    """
    recordings: list[Recording] = []
    for batch in batches:
        if recordings and _is_shared(recordings[0]):
            recording = _record_first(model, chain, batch, _place(*recordings[0].calls[0]))
        else:
            recording = _record_all(model, chain, batch, check=not recordings)
        if recording is None:
            return None
        recordings.append(recording)
    return recordings


def _record_all(model: nn.Module, chain: Chain, batch: dict, check: bool) -> Recording | None:
    order, inputs, outputs = [], [], []

    def before(index, args, kwargs):
        order.append(index)
        inputs.append((args, kwargs))

    handles = []
    for index, (_, block) in enumerate(chain.blocks):
        handles.append(block.register_forward_pre_hook(
            lambda m, a, k, index=index: before(index, a, k), with_kwargs=True))  # fmt: skip
        handles.append(block.register_forward_hook(lambda m, a, output: outputs.append(first(output))))
    with _hooks(handles):
        forward(model, batch)
    if order != list(range(len(chain.blocks))) or not all(isinstance(o, Tensor) for o in outputs):
        return None
    start = next((v for v in (*inputs[0][0], *inputs[0][1].values()) if _is_hidden(v, outputs[0])), None)
    if start is None:
        return None
    calls, hidden = [], start
    for (args, kwargs), output in zip(inputs, outputs, strict=True):
        call = _marked(args, kwargs, hidden)
        if call is None:
            return None
        calls.append(call)
        hidden = output
    recording = Recording(start, calls)
    if check:
        again = recording.enter(0, chain.blocks[0][1], start)
        if not torch.allclose(again, outputs[0], rtol=1e-3, atol=1e-3 * float(outputs[0].abs().max())):
            return None
    return recording


def _record_first(model: nn.Module, chain: Chain, batch: dict, place: int | str) -> Recording | None:
    seen = []

    def stop(module, args, kwargs):
        seen.append((args, kwargs))
        raise _Arrived

    with _hooks([chain.blocks[0][1].register_forward_pre_hook(stop, with_kwargs=True)]):
        try:
            forward(model, batch)
        except _Arrived:
            args, kwargs = seen[0]
            hidden = args[place] if isinstance(place, int) else kwargs[place]
            call = _marked(args, kwargs, hidden)
            return None if call is None else Recording(hidden, [call] * len(chain.blocks))
    return None


def _place(args: tuple, kwargs: dict) -> int | str:
    """Where the hidden states stand among a call's arguments."""
    return next(i for i, a in (*enumerate(args), *kwargs.items()) if a is HIDDEN)


def _marked(args: tuple, kwargs: dict, hidden: Tensor) -> tuple[tuple, dict] | None:
    """A call with HIDDEN in place of the hidden states; None unless they stand in it once."""
    marked = tuple(HIDDEN if a is hidden else a for a in args)
    named = {name: HIDDEN if a is hidden else a for name, a in kwargs.items()}
    return (marked, named) if sum(a is HIDDEN for a in (*marked, *named.values())) == 1 else None


def _is_shared(recording: Recording) -> bool:
    """Whether all blocks were called with the very same objects beside the hidden states."""
    args, kwargs = recording.calls[0]
    return all(
        len(others) == len(args) and named.keys() == kwargs.keys()
        and all(a is b for a, b in zip(args, others, strict=True)) and all(kwargs[k] is v for k, v in named.items())
        for others, named in recording.calls
    )  # fmt: skip


def _is_hidden(value, output: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == output.shape and value.is_floating_point()
