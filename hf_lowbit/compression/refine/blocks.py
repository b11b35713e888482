"""Block stage: each transformer block of a low-bit model is tuned until its outputs match the dense block's.

    min over scales, zero points, rounding, norms, biases of block i
        mean over tokens |B^_i(x^) - B_i(x)|^2 / |B_i(x)|^2

x^ are the states that the blocks before, low-bit and refined already, really hand over; x those of the dense model, so
that a block makes good what the earlier ones lost (Li et al. 2021, BRECQ, eq. 10, with the inputs of QDrop and QEP).
`targets="quantized"` feeds the dense block with x^ instead. How the numbers move: `tuning.py`.

A block whose error on held-out batches did not fall gets its old tensors back, bit for bit, and is tuned once more
with its codes as they are, at a quarter of the rate: with few calibration tokens signs of gradients are noise, and
codes that follow them fit nothing else. If that doesn't help either, it keeps what it had. One block at a time is in
float.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..calls import Batch, undisturbed
from ..layer_stage import Journal
from .calls import Call, find_blocks, mask_of, record, relative_error
from .tuning import Snapshot, Tuning


logger = logging.get_logger(__name__)

TARGETS = ("dense", "quantized")
# (whether codes move, share of the learning rate) of each attempt at a block; the first that helps is kept
ATTEMPTS = ((True, 1.0), (False, 0.25))


@dataclass(frozen=True)
class BlockResult:
    """What became of one block: the held-out error before and after the last attempt, whether that was kept and moved
    codes, or why it was skipped."""

    name: str
    before: float | None = None
    after: float | None = None
    kept: bool = False
    reason: str | None = None
    moved: bool = False


@dataclass
class _Stream:
    """The hidden states of one batch in front of the present block, in the low-bit and in the dense model."""

    batch: Batch
    quantized: Tensor | None = None
    dense: Tensor | None = None


def refine_blocks(
    model: nn.Module,
    dense: nn.Module,
    batches: list[Batch],
    held_out: list[Batch],
    *,
    steps: int = 60,
    learning_rate: float = 2e-3,
    rounding_rate: float | None = None,
    targets: str = "dense",
    seed: int = 0,
    journal: Journal | None = None,
) -> list[BlockResult]:
    """Tune the blocks of the low-bit `model` in place, in order. Returns one result a block.

    Args:
        model: a model that `hf_lowbit.quantize` or `from_pretrained` made low-bit.
        dense: the same model before that; not changed.
        batches: keyword arguments of the model's forward (`input_ids`, `attention_mask`, `pixel_values`, ...), one
            batch a step.
        held_out: other batches, which decide whether a block keeps its new tensors.
        steps: updates a block. learning_rate: of scales, norms and biases (Adam). rounding_rate: of rounding and zero
            points, in steps of the grid; None is 1 / steps.
        targets: "dense" or "quantized": which states the dense block is given.
        seed: order of the batches.
        journal: keeps what is finished; what it holds already is taken from there, with the same result.

    Raises ValueError for empty `batches` or `held_out`, `steps` below 1, and unknown `targets`. A model without
    repeated blocks gives an empty list and a warning.
    """
    check(batches, held_out, steps)
    if targets not in TARGETS:
        raise ValueError(f"`targets`={targets!r} is unknown; use one of {TARGETS}.")
    stacks = find_blocks(model)
    if not stacks:
        logger.warning("The block stage is skipped: %s has no repeated blocks.", type(model).__name__)
    results: list[BlockResult] = []
    with undisturbed(model, dense):
        for name, blocks in stacks:
            stage = _Stack(model, dense, name, blocks, [*batches, *held_out], len(batches), journal)
            settings = {"steps": steps, "rate": learning_rate, "sign_rate": rounding_rate or 1 / steps}
            results += stage.refine(targets, random.Random(seed), **settings)
    return results


def check(batches: list[Batch], held_out: list[Batch], steps: int) -> None:
    """What both stages ask of their arguments."""
    for name, given in (("batches", batches), ("held_out", held_out)):
        if not given:
            raise ValueError(f"`{name}` is empty: refinement needs calibration batches, and others to judge by.")
    if steps < 1:
        raise ValueError(f"`steps`={steps} must be at least 1; leave the stage out instead.")


class _Stack:
    """The blocks of one list in both models, and the states in front of the one that is being refined."""

    def __init__(self, model, dense, name, blocks, batches, training, journal):
        self.journal = journal
        self.model, self.dense, self.name, self.blocks = model, dense, name, blocks
        self.dense_blocks = dense.get_submodule(name)
        self.training = training
        self.streams = [_Stream(batch) for batch in batches]
        self.calls = record(model, blocks, batches)
        self.dense_calls = record(dense, self.dense_blocks, batches)

    def refine(self, targets, order, **settings) -> list[BlockResult]:
        results = []
        for index in logging.tqdm(range(len(self.blocks)), desc=f"Refining {self.name}"):
            name = f"{self.name}.{index}"
            if not self.calls[index] or not self.dense_calls[index]:
                reason = "it is not called once a pass with a hidden state, or does not repeat its output"
                results.append(BlockResult(name, reason=reason))
                self._forget()
                continue
            try:
                self._enter(index)
                known = self._done(index, name, order)
                wanted = [] if known else [self._target(index, s, n, targets) for n, s in enumerate(self.streams)]
                results.append(known or self._tune(index, name, wanted, order, **settings))
                if self.journal and not known:
                    self._keep(index, results[-1], order)
            except ValueError as error:
                results.append(BlockResult(name, reason=str(error)))
            self._advance(index)
            if results[-1].reason:
                logger.warning("`%s` is not refined: %s.", name, results[-1].reason)
        return results

    def _done(self, index: int, name: str, order: random.Random) -> BlockResult | None:
        """The block as an interrupted run left it, with the order of batches that follows; None where it didn't."""
        kept = self.journal.find("block", name) if self.journal else None
        if kept is None:
            return None
        tensors, facts = kept
        with torch.no_grad():
            for key, parameter in self.blocks[index].named_parameters():
                parameter.copy_(tensors[key])
        version, numbers, rest = facts.pop("order")
        order.setstate((version, tuple(numbers), rest))
        return BlockResult(**facts)

    def _keep(self, index: int, result: BlockResult, order: random.Random) -> None:
        tensors = dict(self.blocks[index].named_parameters())
        self.journal.keep("block", result.name, tensors, {**asdict(result), "order": order.getstate()})

    def _forget(self) -> None:
        for stream in self.streams:
            stream.quantized = stream.dense = None

    def _enter(self, index: int) -> None:
        """States in front of block `index`: those that came out of the block before, else a new recording."""
        chained = all(call.chained for call in (*self.calls[index], *self.dense_calls[index]))
        if index and (not chained or self.streams[0].quantized is None):
            # the blocks before have changed since the last recording
            batches = [stream.batch for stream in self.streams]
            self.calls = record(self.model, self.blocks, batches, entry=index)
            self.dense_calls = record(self.dense, self.dense_blocks, batches, entry=index)
            self._forget()
            if not self.calls[index] or not self.dense_calls[index]:
                raise ValueError("it did not repeat its output")
        for n, stream in enumerate(self.streams):
            if stream.quantized is None:
                stream.quantized = self.calls[index][n].hidden
                stream.dense = self.dense_calls[index][n].hidden

    @torch.no_grad()
    def _advance(self, index: int) -> None:
        for n, stream in enumerate(self.streams):
            if stream.quantized is not None:
                stream.quantized = self.calls[index][n].enter(self.blocks[index], stream.quantized)
                stream.dense = self.dense_calls[index][n].enter(self.dense_blocks[index], stream.dense)

    @torch.no_grad()
    def _target(self, index: int, stream: _Stream, n: int, targets: str) -> Tensor:
        hidden = stream.dense if targets == "dense" else stream.quantized
        return self.dense_calls[index][n].enter(self.dense_blocks[index], hidden)

    def _error(self, call: Call, run, stream: _Stream, target: Tensor) -> Tensor:
        mask = mask_of(stream.batch, target.shape, "decoder" in self.name)
        return relative_error(call.enter(run, stream.quantized), target, mask)

    def _tune(self, index, name, wanted, order, steps, rate, sign_rate) -> BlockResult:
        block, calls = self.blocks[index], self.calls[index]

        @torch.no_grad()
        def judge() -> float:
            rows = range(self.training, len(self.streams))
            errors = [float(self._error(calls[n], block, self.streams[n], wanted[n])) for n in rows]
            return sum(errors) / len(errors)

        before = judge()
        for moves, share in ATTEMPTS:
            tuning = Tuning(block, self.dense_blocks[index], rounding=moves, rate=share * rate, steps=steps)
            kept = Snapshot(tuning.tensors())
            rows: list[int] = []
            for _ in range(steps):
                if not rows:
                    rows = order.sample(range(self.training), self.training)
                n = rows.pop()
                self._error(calls[n], tuning.run, self.streams[n], wanted[n]).backward()
                tuning.step(sign_rate)
            tuning.store()
            after = judge()
            if after < before:
                return BlockResult(name, before, after, True, moved=moves)
            kept.restore()
        return BlockResult(name, before, after)
