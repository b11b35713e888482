"""Blocks of a model that run one after the other, and entering each of them again with what it was called with.

A chain is a list of modules of one class, such as `model.layers`. One forward of the whole model records how each
block is called: its arguments, with a mark where the hidden states stand that the block before gave. A block is then
entered with other hidden states without the rest of the model. Nothing about an architecture is assumed: where blocks
don't follow each other, or where one entered again gives another output, there is no record, and the caller uses
forwards of the whole model instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


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
        return first_tensor(block(*args, **kwargs))


def first_tensor(output) -> Tensor:
    """The hidden states of a block's output."""
    return output[0] if isinstance(output, (tuple, list)) else output


def find_chains(model: nn.Module) -> list[Chain]:
    """The outermost lists of two or more modules of one class that hold linear weights."""
    chains: list[Chain] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2 or len({type(child) for child in module}) > 1:
            continue
        if any(name.startswith(f"{block}.") for chain in chains for block, _ in chain.blocks):
            continue
        if len({id(child) for child in module}) < len(module):
            continue
        if any(p.ndim >= 2 for p in module[0].parameters()) and next(module[0].children(), None) is not None:
            chains.append(Chain(name, [(f"{name}.{i}", child) for i, child in enumerate(module)]))
    return chains


def run_model(model: nn.Module, batch: dict) -> None:
    """One forward without caches, on the model's device."""
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    call = {k: _moved(v, parameter) for k, v in batch.items() if not isinstance(v, str)}
    if "use_cache" in inspect.signature(model.forward).parameters:
        call.setdefault("use_cache", False)
    model(**call)


def _moved(value, like: Tensor):
    if not isinstance(value, Tensor):
        return value
    dtype = getattr(like, "dtype", None)
    return value.to(like.device, dtype) if value.is_floating_point() else value.to(like.device)


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
            outputs.append(first_tensor(output))

        handles = []
        for index, (_, block) in enumerate(chain.blocks):
            handles.append(block.register_forward_pre_hook(
                lambda m, a, k, index=index: before(index, m, a, k), with_kwargs=True))  # fmt: skip
            handles.append(block.register_forward_hook(after))
        with _hooks(handles):
            run_model(model, batch)
        if order != list(range(len(chain.blocks))) or not all(isinstance(o, Tensor) for o in outputs):
            return None
        first = next((v for v in (*inputs[0][0], *inputs[0][1].values()) if _is_hidden(v, outputs[0])), None)
        if first is None:
            return None
        calls, hidden = [], first
        for (args, kwargs), output in zip(inputs, outputs, strict=True):
            marked = tuple(HIDDEN if a is hidden else a for a in args)
            named = {name: HIDDEN if a is hidden else a for name, a in kwargs.items()}
            if sum(a is HIDDEN for a in (*marked, *named.values())) != 1:
                return None
            calls.append((marked, named))
            hidden = output
        recording = Recording(first, calls)
        if number == 0:
            again = recording.enter(0, chain.blocks[0][1], first)
            if not torch.allclose(again, outputs[0], rtol=1e-3, atol=1e-3 * float(outputs[0].abs().max())):
                return None
        recordings.append(recording)
    return recordings


def _is_hidden(value, output: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == output.shape and value.is_floating_point()
