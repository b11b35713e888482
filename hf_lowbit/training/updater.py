"""One step of all trained weights: the core that the callback, the optimizer class and gradient release share.

Everything that a step depends on is in `state`, a dict of numbers and plain tensors: the count of steps, the seed, and
the moments by weight name. With the codes themselves it is all that a bit-exact resume needs, since noise is a
function of seed, step, name and element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..functional.update import UpdateKernel, explain_update
from ..nn.slot import CodesParameter
from .leaves import CodesLeaf, Leaf, Moved, make_leaf
from .rules import make_rule
from .shards import Shards, local_part
from .states import States, check_state_bits
from .step import describe, fused, step_leaf


# wrappers that put a prefix before a parameter's name
WRAPPERS = ("_orig_mod.", "module.", "_checkpoint_wrapped_module.")
# the seed when none is given
SEED = 0


@dataclass
class Step:
    """What a step did: moved codes by weight name, or that it was skipped for gradients that are no numbers."""

    skipped: bool = False
    moved: dict[str, Moved] = field(default_factory=dict)


class Updater:
    """Moves `parameters` (name -> parameter) by the rule `optimizer`.

    Args:
        parameters: low-bit weights, learned scales, float parameters.
        optimizer: "adamw", "lion", "sgd", "adafactor", "lars" or "lamb"; `options` are those of the rule
            (`training/rules.py`).
        state_bits: 32, 16, 8 or 4 bits a moment.
        seed: of the rounding noise; the same on every process.
        max_skips: after so many steps in a row with gradients that are no finite numbers, FloatingPointError.
        shards: this process's place among those that share out gradients, states and steps by rows; None: it does all.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        optimizer: str = "adamw",
        state_bits: int = 32,
        seed: int | None = None,
        max_skips: int = 10,
        shards: Shards | None = None,
        **options,
    ):
        check_state_bits(state_bits)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"`seed`={seed!r} must be an integer or None.")
        self.rule, self.state_bits, self.max_skips = make_rule(optimizer, options), state_bits, max_skips
        self.shards = shards
        if shards is not None and self.rule.whole:
            raise ValueError(
                f"`shard_states`=True shares out rows, and `optimizer`={optimizer!r} needs sums over whole matrices; "
                'use "adamw", "lion" or "sgd".'
            )
        seed = SEED if seed is None else seed
        self.state = {"step": 0, "skipped": 0, "seed": seed, "optimizer": optimizer, "weights": {}} | self._part()
        self.leaves: dict[str, Leaf] = {}
        self._states: dict[str, States] = {}
        for name, parameter in parameters:
            self.add(name, parameter)

    def add(self, name: str, parameter: Tensor) -> None:
        """Train one more parameter. ValueError when the name is taken: it keys noise and state."""
        name = plain_name(name)
        if name in self.leaves:
            raise ValueError(f"two parameters are named {name!r}; names tell their noise and their states apart.")
        self.leaves[name] = make_leaf(name, parameter, self.shards)

    def codes(self) -> list[CodesLeaf]:
        """The low-bit weights among the leaves."""
        return [leaf for leaf in self.leaves.values() if isinstance(leaf, CodesLeaf)]

    def shared(self) -> list[Leaf]:
        """The leaves whose rows are shared out."""
        return [leaf for leaf in self.leaves.values() if leaf.shared]

    def finite(self) -> bool:
        """Are all gradients finite numbers, in every process?"""
        return all_finite([leaf.parameter.grad for leaf in self.leaves.values()], self.shards)

    def step(self, rates: Callable[[Leaf], tuple[float, float]]) -> Step:
        """Move every weight that has a gradient; `rates(leaf)` gives (learning rate, weight decay).

        Gradients that are not finite skip the step for all. Raises FloatingPointError after `max_skips` in a row.
        """
        if not self.finite():
            self.skip()
            return Step(skipped=True)
        self.begin()
        leaves = [leaf for leaf in self.leaves.values() if leaf.parameter.grad is not None]
        threads = torch.get_num_threads()
        # a fused kernel shares out the rows of one weight among all threads
        moved = {leaf.name: self.move(leaf, *rates(leaf)) for leaf in leaves if self.kernel(leaf) is not None}
        leaves = [leaf for leaf in leaves if leaf.name not in moved]
        if threads > 1 and len(leaves) > 1 and leaves[0].parameter.device.type == "cpu":
            # a weight a thread: torch's own threads would meet at a barrier in every one of the many small operations
            contexts = [copy_context() for _ in leaves]  # a forced kernel is forced in the threads too
            with ThreadPoolExecutor(threads) as pool:
                found = list(pool.map(lambda c, leaf: c.run(self.move, leaf, *rates(leaf)), contexts, leaves))
        else:
            found = [self.move(leaf, *rates(leaf)) for leaf in leaves]
        moved |= {leaf.name: m for leaf, m in zip(leaves, found, strict=True) if isinstance(leaf, CodesLeaf)}
        return Step(moved=self.gather(moved) if self.shards else moved)

    def gather(self, moved: dict[str, Moved]) -> dict[str, Moved]:
        """Give every process the rows that the others have moved; what all together did."""
        with torch.no_grad():
            for leaf in self.shared():
                if leaf.parameter.grad is not None:
                    self.shards.gather_(leaf.whole())
                    written = leaf.parameter.stored if isinstance(leaf, CodesLeaf) else leaf.parameter
                    torch.autograd.graph.increment_version(written)
        if not moved:
            return moved
        device = self.leaves[next(iter(moved))].parameter.device
        counts = self.shards.sum(torch.tensor(list(moved.values()), dtype=torch.float64, device=device)).tolist()
        return {name: Moved(int(changed), levels) for name, (changed, levels) in zip(moved, counts, strict=True)}

    def kernel(self, leaf: Leaf) -> UpdateKernel | None:
        """The fused kernel that moves a weight which has a gradient, or None for torch."""
        return fused(leaf, leaf.parameter.grad.dtype, self.rule, self.states(leaf))

    def kernels(self, grad_dtype: torch.dtype = torch.float32) -> dict[str, list[tuple[str, str]]]:
        """For each low-bit weight the kernels in the order tried, with why not; the last one runs."""
        return {
            leaf.name: explain_update(describe(leaf, grad_dtype, self.rule, self.states(leaf)))
            for leaf in self.codes()
        }

    def begin(self) -> None:
        """Count a step that is going to be made."""
        self.state["step"] += 1
        self.state["skipped"] = 0

    @torch.no_grad()
    def move(self, leaf: Leaf, lr: float, decay: float) -> Moved:
        """Move one weight, as part of the step that `begin` counted."""
        state = self.state
        if not leaf.rows:
            # other processes hold all of them
            self.states(leaf).tensors["t"] += 1
            return Moved()
        return step_leaf(
            leaf, leaf.gradient(), self.rule, self.states(leaf), float(lr), float(decay), state["seed"], state["step"]
        )

    def skip(self) -> None:
        """Count a skipped step."""
        self.state["skipped"] += 1
        if self.state["skipped"] >= self.max_skips:
            raise FloatingPointError(
                f"the gradients of {self.state['skipped']} steps in a row were not finite numbers: training has "
                "diverged. Lower the learning rate, lengthen the warmup, or clip gradients; the weights are those of "
                "the last good step."
            )

    def states(self, leaf: Leaf) -> States:
        """The moments of a leaf, made when they are first needed."""
        if leaf.name not in self._states:
            saved = self.state["weights"].get(leaf.name)
            try:
                own = leaf.own if leaf.shared else None
                device = leaf.parameter.device
                made = States(self.rule, leaf.all_rows, leaf.columns, self.state_bits, device, saved, own)
            except ValueError as error:
                raise ValueError(f"`{leaf.name}`: {error}.") from None
            self._states[leaf.name] = made
            self.state["weights"][leaf.name] = made.tensors
        return self._states[leaf.name]

    def forget(self, parameter: Tensor, where: Tensor) -> None:
        """Zero the moments of the elements in `where` (bool, of the parameter's shape); a parameter that is not
        trained here, or has no moments yet, is left alone."""
        for leaf in self.leaves.values():
            if leaf.parameter is parameter and leaf.name in self.state["weights"]:
                transposed = isinstance(leaf, CodesLeaf) and leaf.packed.transposed
                self.states(leaf).clear((where.t() if transposed else where)[leaf.own])

    def load(self, state: dict) -> None:
        """Continue from a saved `state`. Raises ValueError when it is of another optimizer or another model."""
        if state.get("optimizer") != self.state["optimizer"]:
            raise ValueError(
                f"the saved state is of `optimizer`={state.get('optimizer')!r}, this run has "
                f"{self.state['optimizer']!r}. Resume with the same one, or start without its state."
            )
        if state.get("part") and state["weights"]:
            raise ValueError(
                f"the saved state is that of process {state['part']}, without the rows of the others. Call "
                "`consolidate_state_dict()` in every process before `state_dict()`."
            )
        unknown = sorted(set(state["weights"]) - set(self.leaves))
        if unknown:
            raise ValueError(f"the saved state is of another model: it has `{unknown[0]}`, which is not trained here.")
        # the caller's dict stays whole
        kept = {k: v for k, v in state.items() if k != "part"}
        self.state, self._states = {**kept, "weights": dict(state["weights"]), **self._part()}, {}
        for name in state["weights"]:
            self.states(self.leaves[name])

    def whole_state(self) -> dict | None:
        """The state with the rows of all processes, in the CPU's memory of process 0; None in the others, which must
        call it too."""
        weights, shared = {}, {leaf.name: leaf for leaf in self.shared()}
        for name, tensors in self.state["weights"].items():
            leaf = shared.get(name)
            if leaf is not None:
                rows = leaf.all_rows
                tensors = {k: t if k == "t" else self.shards.collect(t, rows) for k, t in tensors.items()}
            weights[name] = tensors
        whole = {key: value for key, value in self.state.items() if key != "part"}
        return {**whole, "weights": weights} if self.shards.rank == 0 else None

    def _part(self) -> dict:
        return {} if self.shards is None else {"part": f"{self.shards.rank} of {self.shards.world}"}


def all_finite(tensors: list[Tensor | None], shards: Shards | None = None) -> bool:
    """Are all numbers finite, in every process? A sum is fast and shows NaN and infinity; where one overflowed, all
    are looked at."""
    held = [local_part(tensor.detach()) for tensor in tensors if tensor is not None]
    if not held:
        return True
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in held])
    finite = bool(torch.isfinite(sums).all()) or all(bool(torch.isfinite(tensor).all()) for tensor in held)
    return finite if shards is None else shards.all(finite, held[0].device)


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put before it: the same model, the same noise."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def direct_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """(name, parameter) of what only direct updates can train: low-bit weights and learned scales that take
    gradients."""
    return [
        (plain_name(name), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and (isinstance(parameter, CodesParameter) or getattr(parameter, "_hf_lowbit_scale", False))
    ]


def direct_codes(model: nn.Module) -> list[tuple[str, Tensor]]:
    """(name as the model has it, parameter) of the low-bit weights that take gradients."""
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad and isinstance(p, CodesParameter)]
