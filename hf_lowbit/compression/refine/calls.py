"""Transformer blocks of any model, and the calls that reach them.

A block is a member of a stack (`compression/calls.py`) in which low-bit layers lie. How a block is called (masks,
positions, encoder states) is recorded by a hook in one forward pass of the whole model, and the block is entered again
with those arguments and another hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...nn.packed import LowBitModule
from ..calls import Batch, find_stacks, first, forward


# relative squared error up to which two runs of a block are one: products of another order differ by less
SAME = 1e-4


@dataclass
class Call:
    """The arguments of one call of a block. `hidden`, the state that passes through the blocks, is None where it is
    the output of the block before; that and the output are kept for the first batch in any case."""

    hidden: Tensor | None
    output: Tensor | None
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    chained: bool = False

    def enter(self, run, hidden: Tensor | None = None) -> Tensor:
        """Call `run` with these arguments, on `hidden` where it is given."""
        hidden = self.hidden if hidden is None else hidden
        if "hidden_states" in self.kwargs:
            return first(run(*self.args, **{**self.kwargs, "hidden_states": hidden}))
        return first(run(hidden, *self.args, **self.kwargs))


def find_blocks(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """The stacks in which low-bit layers lie."""
    return find_stacks(model, lambda stack: any(isinstance(inner, LowBitModule) for inner in stack.modules()))


def record(model: nn.Module, blocks: nn.ModuleList, batches: list[Batch], entry: int = 0) -> list[list[Call]]:
    """The calls of each block in a forward pass of each batch: [block][batch]. Block `entry` keeps its inputs.

    The list of a block is empty when it is called other than once a pass, without a hidden state, or when it does not
    give the same output again on the same arguments.
    """
    calls: list[list[Call | None]] = [[] for _ in blocks]
    last: dict[int, Tensor] = {}

    def hook_of(index: int):
        def hook(module, args, kwargs, output):
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            if not isinstance(hidden, Tensor) or not isinstance(output, (Tensor, tuple, list)):
                calls[index].append(None)
                return
            before = last.pop(index - 1, None)
            chained = before is not None and before.shape == hidden.shape and torch.equal(before, hidden)
            last[index] = first(output)
            keep = not calls[index]
            kept = hidden if keep or not chained or index == entry else None
            named = "hidden_states" in kwargs
            rest = {**kwargs, "hidden_states": None} if named else kwargs
            output = last[index] if keep else None
            calls[index].append(Call(kept, output, args if named else args[1:], rest, chained))

        return hook

    handles = [b.register_forward_hook(hook_of(i), with_kwargs=True) for i, b in enumerate(blocks)]
    try:
        with torch.no_grad():
            for batch in batches:
                forward(model, batch)
                last.clear()
    finally:
        for handle in handles:
            handle.remove()
    usable = [made if len(made) == len(batches) and all(made) else [] for made in calls]
    return [made if made and _reproduces(block, made[0]) else [] for block, made in zip(blocks, usable, strict=True)]


@torch.no_grad()
def _reproduces(block: nn.Module, call: Call) -> bool:
    again = call.enter(block)
    return again.shape == call.output.shape and float(relative_error(again, call.output, None)) < SAME


def mask_of(batch: Batch, shape: torch.Size, decoder: bool) -> Tensor | None:
    """The padding mask [B, T] of hidden states of `shape`, or None where the batch has none of that size."""
    names = ("decoder_attention_mask",) if decoder and "decoder_attention_mask" in batch else ("attention_mask",)
    for name in names:
        mask = batch.get(name)
        if mask is not None and mask.ndim == 2 and tuple(mask.shape) == tuple(shape[:2]):
            return mask
    return None


def relative_error(output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over tokens of |output - target|^2 / |target|^2: what follows normalizes each token by itself.

    `output`, `target` [B, T, D] or any shape with the features last; padding (0 in `mask`) does not count.
    """
    target = target.detach().to(torch.float32)
    wrong = (output.to(torch.float32) - target).square().sum(-1)
    error = wrong / target.square().sum(-1).clamp_min(1e-12)
    if mask is None:
        return error.mean()
    mask = mask.to(error.device, torch.float32)
    return (error * mask).sum() / mask.sum().clamp_min(1)
