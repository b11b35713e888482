"""`DQTOptimizer`: direct updates as a torch optimizer, for loops of your own, for accelerate, and for Trainer's
`optimizers=(..., ...)`.

It moves low-bit weights, learned scales and float parameters by one rule. Its state lies under one key that is no
tensor: torch casts what it finds under a parameter to the parameter's dtype when it loads a state dict, and low-bit
states would not survive that.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..nn.slot import CodesParameter
from .leaves import Leaf
from .reducer import Reducer, close_reducers, leave_out_of_ddp
from .replicas import same_everywhere, synchronize
from .shards import here
from .updater import Step, Updater


STATE_KEY = "hf_lowbit"


class DQTOptimizer(Optimizer):
    """Optimizer whose low-bit weights move by stochastic rounding of the step itself (Direct Quantized Training).

    Args:
        params: a model, or what torch optimizers take: parameters, (name, parameter) pairs, or groups of them. Give a
            model or names: noise and states are keyed by them, and a run is then the same whatever the order.
        lr: learning rate (default 1e-3).
        optimizer: "adamw" (default), "lion", "sgd" (with momentum), "adafactor", "lars" or "lamb".
        state_bits: 32 (default), 16, 8 or 4 bits for each moment.
        weight_decay: decoupled, as in AdamW (default 0; it pulls ternary weights to 0).
        seed: of the rounding noise (default 0), the same on every process.
        release_gradients: update each weight in the backward pass, as soon as its gradient is there, and drop the
            gradient. No accumulation over backward passes, no clipping by global norm, one process.
        shard_states: share out gradients and states over the processes of torch.distributed, by rows (default False;
            "adamw", "lion" and "sgd"): each process holds 1 / processes of them, all hold the weights. Give the model
            itself, after `init_process_group` and before DDP wraps it; DDP averages what is not shared out (vectors,
            learned scales, small matrices). `consolidate_state_dict` comes before `state_dict`.
        max_skips: FloatingPointError after so many steps in a row (default 10) whose gradients are not finite; each
            such step is skipped as a whole.
        options: of the rule, such as `betas`, `eps`, `momentum` (`hf_lowbit/training/rules.py`).

    Attributes:
        last_step: what the last step did, by weight.

    Raises:
        TypeError, ValueError: for unknown options and values out of range, and for parameters that FSDP has sharded or
            shards later (then at the first step). RuntimeError: at the first step with `shard_states`, where nothing
            averages what is not shared out; from `state_dict` before the states were consolidated.
    """

    def __init__(
        self,
        params: nn.Module | Iterable,
        lr: float = 1e-3,
        optimizer: str = "adamw",
        state_bits: int = 32,
        weight_decay: float = 0.0,
        seed: int | None = None,
        release_gradients: bool = False,
        max_skips: int = 10,
        shard_states: bool = False,
        **options,
    ):
        if shard_states:
            _check_shareable(params, release_gradients)
        shards = here() if shard_states else None
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"`lr`={lr!r} and `weight_decay`={weight_decay!r} must not be negative.")
        self._updater = Updater((), optimizer, state_bits, seed, max_skips, shards, **options)
        self.last_step = Step()
        self._groups: dict[str, int] = {}
        self._released: dict[str, object] = {}
        self._release = release_gradients
        self._whole: dict | None = None
        self._consolidated = self._averaged = False
        model = params if isinstance(params, nn.Module) else None
        self._model = None if model is None else weakref.ref(model)
        if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
            _refuse_shards("accelerate is set up for FSDP")
        if model is not None:
            params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        if not self._updater.codes():
            raise ValueError(
                "`params` holds no trainable low-bit weight; quantize the model with DQTConfig first, or use an "
                "ordinary optimizer."
            )
        self.state[STATE_KEY] = self._updater.state
        if model is not None:
            self._share_out(model)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names")
        for position, parameter in enumerate(group["params"]):
            if not parameter.requires_grad:
                continue
            if _is_sharded(parameter):
                _refuse_shards(f"`{names[position] if names else position}` is a shard of FSDP or tensor parallelism")
            name = names[position] if names else f"{len(self.param_groups) - 1}.{position}"
            self._updater.add(name, parameter)
            leaf = list(self._updater.leaves.values())[-1]
            self._groups[leaf.name] = len(self.param_groups) - 1
            if self._release and isinstance(parameter, CodesParameter):
                parameter.register_post_accumulate_grad_hook(lambda _, leaf=leaf: self._step_released(leaf))

    @torch.no_grad()
    def step(self, closure=None):
        """One step; returns the closure's loss. Sets `last_step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._released:
            return self._finish_released(loss)
        self._check_replaced()
        self._check_averaged()
        self._whole, self._consolidated = None, False
        self.last_step = self._updater.step(self._rates)
        return loss

    @property
    def updater(self) -> Updater:
        """The core: leaves, states, counts."""
        return self._updater

    def consolidate_state_dict(self) -> None:
        """Collect the states that are shared out in the CPU's memory of process 0, whose `state_dict` then has them
        all, until the next step. Every process must call it; without `shard_states` it does nothing."""
        if self._updater.shards is not None:
            self._whole, self._consolidated = self._updater.whole_state(), True

    def state_dict(self) -> dict:
        """As of any optimizer. With `shard_states` it is whole in process 0 and, in the others, good for nothing."""
        if self._updater.shards is not None and self._updater.state["weights"] and not self._consolidated:
            raise RuntimeError(
                "the states are shared out over the processes: call `consolidate_state_dict()` in every process, then "
                "`state_dict()`. In a Trainer, which saves from one process, use DQTCallback(shard_states=True)."
            )
        self.state[STATE_KEY] = self._whole or self._updater.state
        try:
            return super().state_dict()
        finally:
            self.state[STATE_KEY] = self._updater.state

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        saved = self.state.get(STATE_KEY)
        if saved is None:
            raise ValueError("the state dict is not one of DQTOptimizer; load one that it saved.")
        self._updater.load(saved)
        self.state[STATE_KEY] = self._updater.state
        self._whole, self._consolidated = None, False

    def _share_out(self, model: nn.Module) -> None:
        """Take the gradients of what is shared out from DDP, and undo what an earlier optimizer of the model did."""
        close_reducers(model.parameters())
        shared = {id(leaf.parameter): leaf for leaf in self._updater.leaves.values() if leaf.shared}
        leave_out_of_ddp(model, [name for name, p in model.named_parameters() if id(p) in shared])
        if shared:
            # DDP sends process 0's weights, but for those that it leaves alone
            synchronize((leaf.name, leaf.parameter) for leaf in shared.values())
            Reducer(list(shared.values()), self._updater.shards)

    def _check_averaged(self) -> None:
        """Raise RuntimeError when the gradients of what is not shared out differ between processes; looks once."""
        if self._updater.shards is None or self._averaged:
            return
        grads = [(leaf.name, leaf.parameter.grad) for leaf in self._updater.leaves.values() if not leaf.shared]
        if not same_everywhere((name, grad) for name, grad in grads if grad is not None):
            raise RuntimeError(
                "with `shard_states`=True the processes have different gradients of what is not shared out, such as "
                f"`{grads[0][0]}`: wrap the model in DistributedDataParallel after making the optimizer."
            )
        self._averaged = True

    def _check_replaced(self) -> None:
        """Raise ValueError when the parameters are no longer those of the model: sharding after the optimizer was made
        puts others in their place, and these would never see a gradient."""
        ours = {id(leaf.parameter) for leaf in self._updater.leaves.values()}
        held = [p for group in self.param_groups for p in group["params"]]
        model = self._model() if self._model is not None else None
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if model is not None and distributed:
            held += model.parameters()
        if any(parameter.requires_grad and id(parameter) not in ours for parameter in held):
            _refuse_shards("the model's parameters were replaced after the optimizer was made")
        if distributed and all(leaf.parameter.grad is None for leaf in self._updater.leaves.values()):
            _refuse_shards("no parameter has a gradient, as when a model is sharded after its optimizer was made")

    def _rates(self, leaf: Leaf) -> tuple[float, float]:
        group = self.param_groups[self._groups[leaf.name]]
        return group["lr"], group["weight_decay"]

    def _step_released(self, leaf: Leaf) -> None:
        """Called in the backward pass, when a weight's gradient is there."""
        if leaf.name in self._released:
            raise RuntimeError(
                f"`release_gradients`=True got a second gradient for `{leaf.name}` before `step()`: they can't be "
                "accumulated over backward passes, and a weight can't be used twice: its update is done."
            )
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if torch.distributed.get_world_size() > 1:
                raise RuntimeError("`release_gradients`=True works in one process: replicas average whole gradients.")
        if not self._released:
            # skips in a row are counted when the step ends
            self._updater.state["step"] += 1
        grad: Tensor = leaf.parameter.grad
        self._released[leaf.name] = None
        if bool(torch.isfinite(grad).all()):
            self._released[leaf.name] = self._updater.move(leaf, *self._rates(leaf))
        leaf.parameter.grad = None

    def _finish_released(self, loss):
        """Move the float parameters; the low-bit weights have moved already, those with finite gradients."""
        moved, self._released = self._released, {}
        skipped = None in moved.values() or not self._updater.finite()
        if skipped:
            self._updater.skip()
        else:
            self._updater.state["skipped"] = 0
            for leaf in self._updater.leaves.values():
                if leaf.parameter.grad is not None:
                    self._updater.move(leaf, *self._rates(leaf))
        self.last_step = Step(skipped, {} if skipped else moved)
        return loss


def _check_shareable(params, release_gradients: bool) -> None:
    if not isinstance(params, nn.Module):
        raise TypeError("`shard_states`=True needs the model, not parameters of it: DDP has to be told through it.")
    if isinstance(params, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "`shard_states`=True needs the model before DistributedDataParallel wraps it: make the optimizer first."
        )
    if release_gradients:
        raise ValueError(
            "`release_gradients`=True works in one process; `shard_states`=True keeps a gradient's own rows only."
        )


def _is_sharded(parameter: Tensor) -> bool:
    """Is it one process's part of a parameter (a DTensor, or FSDP 1's flat parameter)?"""
    return hasattr(parameter, "device_mesh") or type(parameter).__name__ == "FlatParameter"


def _refuse_shards(found: str) -> None:
    raise ValueError(
        f"{found}: packed weights can't be sharded, and float shards of them would be trained in their place. Train "
        "with DDP and `shard_states`=True, which shares out gradients and states."
    )
