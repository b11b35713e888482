"""The layer stage: every weight rounded on its grid, each with statistics of the model quantized so far.

Block by block: inputs Xq of each layer are taken in the model as it is quantized so far, GPTQ chooses the codes, and
the packed block makes the inputs of the next one. With a `propagation`, dense inputs X are taken beside them (a second
stream through the recorded chain), and the weight is first moved toward the dense outputs (`propagation.py`). Layers
outside of the blocks come last, with one forward of the whole model. Tables, fused experts and layers that no token
reached are rounded without data, and listed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..functional.grid import grid_of
from ..functional.packing import pack
from ..nn.packed import PackedWeight
from ..nn.swap import convert
from ..nn.targets import Target
from .calls import forward, undisturbed
from .chains import Chain, Recording, find_chains, record
from .propagation import Propagation, correct
from .solvers.gptq import Solution, solve
from .statistics import Accumulator, watch_inputs


SOLVED_KINDS = ("linear", "conv1d")
WITHOUT_DATA = {
    "embedding": "a table is rounded without data",
    "experts": "fused experts are rounded without data",
}


class Journal(Protocol):
    """Where a stage writes down what it has finished (`pipeline/journal.py`)."""

    def find(self, stage: str, key: str) -> tuple[dict[str, Tensor], Any] | None: ...

    def keep(self, stage: str, key: str, tensors: dict[str, Tensor], facts: Any) -> None: ...


@dataclass
class ModuleRecord:
    """How one weight was rounded: `error` is the relative output error (None without data), `note` what to know."""

    name: str
    bits: str | int
    method: str
    error: float | None
    tokens: int
    note: str | None = None


def quantize_layers(
    model: nn.Module,
    targets: list[Target],
    batches: list[dict],
    propagation: Propagation | None = None,
    passes: int = 1,
    journal: Journal | None = None,
) -> list[ModuleRecord]:
    """Convert `targets` in place by GPTQ with error propagation. Training mode and hooks are as before.

    Args:
        batches: see `calibrate.make_batches`. propagation: the correction toward the dense model; None for none.
        passes: how often the inputs inside a block are taken anew while it is quantized: 1 takes them once.
        journal: keeps what is finished; what it holds already is taken from there, with the same result.

    Raises:
        ValueError: when a weight, or an input on the data, holds NaN or infinity.
    """
    targets = [target for target in targets if target.packed is not None]
    with undisturbed(model), torch.no_grad():
        return _Stage(model, targets, batches, propagation, passes, journal).run()


class _Stage:
    def __init__(self, model, targets, batches, propagation, passes, journal):
        self.model, self.batches, self.propagation, self.passes = model, batches, propagation, passes
        self.journal = journal
        self.waiting = {t.name: t for t in targets}
        self.records: list[ModuleRecord] = []

    def run(self) -> list[ModuleRecord]:
        chains = find_chains(self.model)
        dense = {chain.name: record(self.model, chain, self.batches) for chain in chains}
        free = [t for t in self.waiting.values() if t.kind == "embedding"]
        tied = {id(t.module._parameters[t.parameter]) for t in free}
        self._round([t for t in self.waiting.values() if id(t.module._parameters[t.parameter]) in tied], None)
        changed = bool(free)
        for chain in chains:
            if dense[chain.name] is None:
                continue
            streams = record(self.model, chain, self.batches) if changed else dense[chain.name]
            if streams is not None:
                self._chain(chain, dense.pop(chain.name), streams)
                changed = True
        self._rest()
        return self.records

    def _chain(self, chain: Chain, dense: list[Recording], quantized: list[Recording]) -> None:
        x, xq = [r.hidden for r in dense], [r.hidden for r in quantized]
        for index, (name, block) in enumerate(logging.tqdm(chain.blocks, desc=f"Quantizing {chain.name}")):
            inside = [t for n, t in self.waiting.items() if n.startswith(f"{name}.")]
            original = copy.deepcopy(block) if inside and self.propagation else block
            solved = {t.module_name: t for t in inside if t.kind in SOLVED_KINDS}
            if self._take(list(solved.values())):
                solved = {}
            while solved:
                sums = Accumulator()
                here = {n: t.module for n, t in solved.items()}
                there = {n: original.get_submodule(n[len(name) + 1 :]) for n in solved}
                for b, batch in enumerate(self.batches):
                    dense_seen = None
                    if self.propagation:
                        with watch_inputs(there) as dense_seen:
                            dense[b].enter(index, original, x[b])
                    with watch_inputs(here) as seen:
                        quantized[b].enter(index, block, xq[b])
                    sums.add(seen, dense_seen, batch)
                groups = sums.groups()
                if not groups:
                    break
                for found in groups if self.passes == 1 else groups[:1]:
                    members = [solved.pop(n) for n in found.names]
                    self._solve(members, found)
            self._round([t for t in inside if t.name in self.waiting], "no token of the calibration data reached it")
            for b in range(len(self.batches)):
                if self.propagation:
                    x[b] = dense[b].enter(index, original, x[b])
                xq[b] = quantized[b].enter(index, block, xq[b])

    def _rest(self) -> None:
        solved = {t.module_name: t for t in self.waiting.values() if t.kind in SOLVED_KINDS}
        if solved and not self._take(list(solved.values())):
            sums = Accumulator()
            for batch in self.batches:
                with watch_inputs({n: t.module for n, t in solved.items()}) as seen:
                    forward(self.model, batch)
                sums.add(seen, None, batch)
            for found in sums.groups():
                self._solve([solved[n] for n in found.names], found)
        self._round(list(self.waiting.values()), "no token of the calibration data reached it")

    def _take(self, targets: list[Target]) -> bool:
        """Convert `targets` to what the journal holds of them; False, and nothing done, where it lacks one."""
        kept = {t.name: self.journal.find("layer", t.name) for t in targets} if self.journal else {}
        if not targets or not kept or None in kept.values():
            return False
        device = {t.name: t.module._parameters[t.parameter].device for t in targets}
        stored = {n: {s: v.to(device[n]) for s, v in _by_suffix(tensors).items()} for n, (tensors, _) in kept.items()}
        convert(targets, lambda target, weight: stored[target.name], quiet=True)
        for target in targets:
            self._record(target, **kept[target.name][1])
        return True

    def _solve(self, members: list[Target], found) -> None:
        if self._take(members):
            return
        weights = [_oriented(t) for t in members]
        if self.propagation:
            weights = [correct(w, found, self.propagation)[0] for w in weights]
        solutions = solve(weights, found.hessian, [t.packed.scheme for t in members])
        stored = {t.name: store(s, t.packed) for t, s in zip(members, solutions, strict=True)}
        convert(members, lambda target, weight: stored[target.name], quiet=True)
        for target, solution in zip(members, solutions, strict=True):
            facts = {"method": "gptq", "error": solution.error, "tokens": found.tokens, "note": solution.note}
            if self.journal:
                tensors = {f"weight{suffix}": tensor for suffix, tensor in stored[target.name].items()}
                self.journal.keep("layer", target.name, tensors, facts)
            self._record(target, **facts)

    def _round(self, targets: list[Target], note: str | None) -> None:
        if not targets:
            return
        convert(targets, quiet=True)
        for target in targets:
            self._record(target, "rtn", None, 0, WITHOUT_DATA.get(target.kind, note))

    def _record(self, target: Target, method: str, error, tokens: int, note) -> None:
        self.waiting.pop(target.name, None)
        self.records.append(ModuleRecord(target.name, target.packed.scheme.bits, method, error, tokens, note))


def _by_suffix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("weight"): tensor for name, tensor in tensors.items()}


def _oriented(target: Target) -> Tensor:
    weight = target.module._parameters[target.parameter].detach().to(torch.float32)
    return weight.t().contiguous() if target.transposed else weight


def store(solution: Solution, packed: PackedWeight) -> dict[str, Tensor]:
    """The stored tensors by suffix of a solution."""
    codes, scale, zero_point = solution.quantized
    shapes = packed.tensors()
    stored = {"": pack(codes, grid_of(packed.scheme.bits)).view(shapes[""][0]), "_scale": scale.contiguous()}
    if zero_point is not None:
        stored["_zero_point"] = zero_point
    return stored
