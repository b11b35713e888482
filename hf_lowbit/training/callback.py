"""`DQTCallback`: direct updates inside any Trainer, whatever optimizer it has.

The callback acts in `on_pre_optimizer_step`: gradients are accumulated, averaged over processes and clipped by then.
It moves the low-bit weights by their own rule, at the learning rate and weight decay of their parameter group, and
drops their gradients, so that the Trainer's optimizer goes on to train the float parameters alone. Schedulers, warmup,
accumulation and logging are the Trainer's.

Its state lies in the optimizer's state under a key that is no tensor: so it is saved in `optimizer.pt` and read back
uncast, and a resumed run continues bit for bit.
"""

from __future__ import annotations

import os
import sys

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from ..nn.arming import trainable_modules
from .leaves import Leaf
from .monitor import Monitor
from .optimizer import STATE_KEY, DQTOptimizer
from .reducer import Reducer, close_reducers, leave_out_of_ddp, left_out_of_ddp
from .replicas import check_replicas, synchronize, world_size
from .shards import Shards, here
from .updater import Step, Updater, all_finite, direct_codes, direct_parameters


logger = logging.get_logger(__name__)


class DQTCallback(TrainerCallback):
    """Trains the low-bit weights of a model that was made with `DQTConfig`; pass it to `Trainer(callbacks=[...])`.

    Works with Trainer, Seq2SeqTrainer and TRL's trainers. The float parameters are trained by the Trainer's own
    optimizer. Learning rate and weight decay come from its parameter groups.

    Args:
        optimizer: rule for the low-bit weights: "adamw" (default), "lion", "sgd", "adafactor", "lars" or "lamb".
        state_bits: 32 (default), 16, 8 or 4 bits for each of its moments.
        seed: of the rounding noise; None (default): the Trainer's `seed`.
        learning_rate_scale: factor on the group's learning rate (default 1.0).
        log_per_weight: log the rates of every weight too (default False).
        check_replicas_every: steps after which the replicas of a data-parallel run are compared (default 100; also at
            the start, at every save, and at the end).
        shard_states: share out gradients and states of the low-bit weights over the processes of a DDP run, by rows
            (default False; "adamw", "lion" and "sgd"): each holds 1 / processes of them, all hold the codes. Needs to
            be in `Trainer(callbacks=[...])`.
        max_skips: stop with FloatingPointError after so many steps in a row (default 10) whose gradients are not
            finite; each such step is skipped, for the float parameters too.
        options: of the rule: `betas`, `eps`, `momentum`, ...; those of AdamW default to the Trainer's arguments.

    Attributes:
        changed_codes: codes changed since training began. last_step: what the last step did.

    Raises:
        TypeError, ValueError: for unknown options; at the start of training, when the model has nothing to train
            directly, when another callback or `DQTOptimizer` already does, under fp16 loss scaling, DeepSpeed or FSDP.
    """

    def __init__(
        self,
        optimizer: str = "adamw",
        state_bits: int = 32,
        seed: int | None = None,
        learning_rate_scale: float = 1.0,
        log_per_weight: bool = False,
        check_replicas_every: int = 100,
        max_skips: int = 10,
        shard_states: bool = False,
        **options,
    ):
        if learning_rate_scale <= 0:
            raise ValueError(f"`learning_rate_scale`={learning_rate_scale!r} must be positive.")
        if check_replicas_every < 1:
            raise ValueError(f"`check_replicas_every`={check_replicas_every!r} must be at least 1.")
        # checked here, before a model is loaded; the real one is made when training begins
        Updater((), optimizer, state_bits, seed, max_skips, Shards(0, 2) if shard_states else None, **options)
        self.shard_states = shard_states
        self.optimizer, self.state_bits, self.seed, self.options = optimizer, state_bits, seed, options
        self.learning_rate_scale, self.log_per_weight = learning_rate_scale, log_per_weight
        self.check_replicas_every, self.max_skips = check_replicas_every, max_skips
        self.changed_codes = 0
        self.last_step = Step()
        self._updater: Updater | None = None
        self._optimizer = None
        self._reducer: Reducer | None = None
        self._collected = False

    def on_init_end(self, args, state, control, model=None, **kwargs):
        # DDP is made before training begins, and looks once
        shared = direct_codes(model) if self.shard_states and args.world_size > 1 else []
        leave_out_of_ddp(model, [name for name, _ in shared])

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        inner = getattr(optimizer, "optimizer", optimizer)
        if self._updater is not None:
            self._release()
        self._refuse(args, model, inner)
        parameters = direct_parameters(model)
        options = dict(self.options)
        if self.optimizer == "adamw":
            options = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon, **options}
        seed = args.seed if self.seed is None else self.seed
        shards = here() if self.shard_states else None
        updater = Updater(parameters, self.optimizer, self.state_bits, seed, self.max_skips, shards, **options)
        saved = inner.state.get(STATE_KEY)
        if saved is not None:
            # the optimizer's state was loaded before training began: this is a resumed run
            updater.load(saved)
        inner.state[STATE_KEY] = updater.state
        self._groups = self._find_groups(inner, updater)
        self._parameters, self._updater, self._optimizer = parameters, updater, inner
        self.changed_codes, self.last_step = 0, Step()
        inner._hf_lowbit_callback = self
        synchronize(parameters)
        check_replicas(parameters, state.global_step)
        close_reducers(parameter for _, parameter in parameters)
        self._reducer = Reducer(updater.shared(), shards) if shards else None
        self.monitor = Monitor(updater, self.log_per_weight)
        _take_places(self, [CollectStates(self)] if shards else [])

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        updater = self._updater
        if updater is None:
            return
        self._keep_own_states()
        if not all_finite([parameter.grad for parameter in model.parameters()], updater.shards):
            logger.warning(f"step {state.global_step + 1}: gradients are not finite numbers; the step is skipped.")
            # without a gradient no optimizer moves a parameter
            model.zero_grad(set_to_none=True)
            self.last_step = Step(skipped=True)
            self.monitor.record(self.last_step)
            updater.skip()
            return
        self.last_step = updater.step(self._rates)
        self.monitor.record(self.last_step)
        self.changed_codes += sum(moved.changed for moved in self.last_step.moved.values())
        for _, parameter in self._parameters:
            parameter.grad = None
        if world_size() > 1 and updater.state["step"] % self.check_replicas_every == 0:
            check_replicas(self._parameters, state.global_step + 1)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self._updater is None or logs is None or "loss" not in logs:
            return
        metrics = self.monitor.collect(float(next(iter(self._groups.values()))["lr"]) * self.learning_rate_scale)
        logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)

    def on_save(self, args, state, control, **kwargs):
        if self._updater is None:
            return
        check_replicas(self._parameters, state.global_step)
        if self._updater.shards and not self._collected and not args.save_only_model:
            raise RuntimeError(
                f"the checkpoint of step {state.global_step} lacks the states of the other processes: something asked "
                "for it after all callbacks had been told of the step's end. Set `control.should_save` in "
                "`on_step_end`, `on_epoch_end` or `on_evaluate`, or train without `shard_states`."
            )
        self._keep_own_states()

    def on_train_end(self, args, state, control, **kwargs):
        if self._updater is None:
            return
        check_replicas(self._parameters, state.global_step)
        if state.global_step and not self.changed_codes:
            logger.warning(
                "direct training ended and no code has changed: the learning rate was too low for the grid, or no "
                "gradient reached the low-bit weights."
            )
        self._release()

    @property
    def updater(self) -> Updater | None:
        """The core while training runs: leaves, states, counts."""
        return self._updater

    def collect_states(self) -> None:
        """Put the states of all processes where process 0 will save them; every process must call it."""
        if self._updater is not None and not self._collected:
            whole = self._updater.whole_state()
            self._optimizer.state[STATE_KEY] = self._updater.state if whole is None else whole
            self._collected = True

    def _keep_own_states(self) -> None:
        self._optimizer.state[STATE_KEY] = self._updater.state
        self._collected = False

    def _release(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
        self._reducer = None
        self._optimizer.__dict__.pop("_hf_lowbit_callback", None)
        self._updater = self._optimizer = None

    def _rates(self, leaf: Leaf) -> tuple[float, float]:
        group = self._groups[leaf.name]
        return float(group["lr"]) * self.learning_rate_scale, group.get("weight_decay", 0.0)

    def _find_groups(self, optimizer, updater: Updater) -> dict[str, dict]:
        by_parameter = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, leaf in updater.leaves.items() if id(leaf.parameter) not in by_parameter]
        if missing:
            raise ValueError(
                f"`{missing[0]}` is in no parameter group of the Trainer's optimizer, so it has no learning rate. "
                "Build the optimizer from all parameters that require gradients; the callback moves the low-bit ones."
            )
        groups = {name: by_parameter[id(leaf.parameter)] for name, leaf in updater.leaves.items()}
        decays = {group.get("weight_decay", 0.0) for group in groups.values()}
        ternary = any(leaf.grid.bits == "ternary" for leaf in updater.codes())
        if ternary and max(decays) > 0.01:
            logger.warning(
                f"`weight_decay`={max(decays)} pulls ternary weights to 0 with every step, by whole levels; 0.01 or "
                "less is what works."
            )
        return groups

    def _refuse(self, args, model: nn.Module, optimizer) -> None:
        """Raise ValueError for what would train wrongly, or not at all."""
        if isinstance(optimizer, DQTOptimizer):
            raise ValueError("the Trainer already has a DQTOptimizer: use that or DQTCallback, not both.")
        if getattr(optimizer, "_hf_lowbit_callback", self) is not self:
            raise ValueError("two DQTCallbacks are in the Trainer's callbacks: each would move the weights. Pass one.")
        if not direct_parameters(model):
            reason = "its low-bit weights are frozen" if any(trainable_modules(model)) else "it has none"
            raise ValueError(
                f"DQTCallback has no low-bit weight to train: {reason}. Load the model with `DQTConfig`, or leave the "
                "callback out (adapters on frozen weights need none)."
            )
        if getattr(args, "fp16", False):
            raise ValueError(
                "`fp16`=True scales the loss, and a step that overflowed would still move the low-bit weights. Use "
                "`bf16`=True."
            )
        if getattr(args, "deepspeed", None):
            raise ValueError("`deepspeed` keeps gradients and states in shards of its own; train with DDP instead.")
        if getattr(args, "fsdp", None) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
            raise ValueError(
                "`fsdp` can't shard packed weights. Train with DDP (`fsdp`=None) and DQTCallback(shard_states=True): "
                "codes are small, and gradients and states are shared out over the processes."
            )
        shared = {name for name, _ in direct_codes(model)} if self.shard_states and world_size() > 1 else set()
        if left_out_of_ddp(model) != shared:
            raise ValueError(
                f"`shard_states`={self.shard_states}, and DDP wrapped the model before it was told so. Give "
                "DQTCallback to `Trainer(callbacks=[...])`, not to `add_callback`, after freezing what is frozen."
            )


class CollectStates(TrainerCallback):
    """The last to hear that a step, an epoch or an evaluation ended: if a checkpoint is to follow, the states that are
    shared out are collected. Saving itself is done by process 0 alone, which could ask the others for nothing."""

    def __init__(self, owner: DQTCallback):
        self.owner = owner

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_save and not args.save_only_model:
            self.owner.collect_states()

    def on_epoch_end(self, args, state, control, **kwargs):
        self.on_step_end(args, state, control)

    def on_evaluate(self, args, state, control, **kwargs):
        # whether this evaluation is the best, and so saved, is decided when all callbacks were told of it
        if (control.should_save or args.save_strategy == SaveStrategy.BEST) and not args.save_only_model:
            self.owner.collect_states()


def _take_places(callback: DQTCallback, last: list[TrainerCallback]) -> None:
    """Move the callback before those that report to TensorBoard and others, so that they see its metrics; put `last`
    after all.

    Trainer puts a user's callbacks last and tells none of them who calls; the handler is found as the caller.
    """
    frame = sys._getframe(1)
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            others = [c for c in handler.callbacks if c is not callback and not isinstance(c, CollectStates)]
            handler.callbacks[:] = [callback, *others, *last]
            return
        frame = frame.f_back
