"""`BlastCallback`: blocked prune-and-grow inside any Trainer, whatever optimizer it has.

The dense gradient by which blocks grow is taken in the backward pass, before the Trainer clips; the gradient of dead
blocks is zero by then, so it counts in no norm. After the optimizer's step masks are updated where the schedule says
so, moments of changed blocks are zeroed, and dead blocks are set back to zero. At the end of training the layers are
packed: what is saved then are live blocks only.

The masks lie in the optimizer's state under a key that is no tensor: they are saved in `optimizer.pt`, and a resumed
run continues bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging

from ..configs.blast import check_sparsity
from ..functional.block_masks import GROWTHS, SCORES
from ..nn.block_sparse import BlockWeight
from ..nn.sparsify import masked_modules, pack_blocks, settle_mask, sparse_modules
from .distillation import Distillation
from .pruner import BlockPruner
from .schedule import SHAPES, Schedule


logger = logging.get_logger(__name__)

STATE_KEY = "hf_lowbit_blast"
COMPUTES = ("auto", "dense", "sparse")


def check_number(field: str, value: Any, what: str, fits: Callable[[int | float], bool]) -> None:
    """Raise TypeError unless `value` is a number, ValueError unless it fits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{field}`={value!r} must be {what}.")
    if not fits(value):
        raise ValueError(f"`{field}`={value!r} must be {what}.")


class BlastCallback(TrainerCallback):
    """Prunes (and grows) blocks of a model made with `BlastConfig`; pass it to `Trainer(callbacks=[...])`.

    Args:
        step_size: optimizer steps between two updates of the masks (default 100).
        decay: the last steps of training, whose masks are frozen: a share of all (default 0.25), or a number of steps.
        schedule: how sparsity rises to the target: "cubic" (default) or "linear".
        initial_sparsity: where it starts (default 0.0).
        score: of a block: "fro" (default), its norm; "l1"; "act", its norm weighted by the mean square of its inputs.
        grow: "none" (default): prune only; growth showed no steady gain in our measurements (docs/sparsity.md).
            "budget": a share of the live blocks are chosen by their gradient; "union": the best by weight and the
            best by gradient.
        grow_fraction: the share of "budget" at the start, falling to 0 with a cosine (default 0.3).
        reset_optimizer_state: zero the moments of blocks that were pruned or grown (default True).
        compute: "auto" (default) trains on live blocks alone once that is faster, "dense" never, "sparse" always.
        total_steps: length of the schedule; None (default): that of the training.
        teacher: a dense model, or the folder or id of one of the model's class, whose outputs the model is trained
            towards too; None (default): none. Its logits and the model's must name the same classes.
        distill_weight: the share of the loss that the distance to the teacher has (default 0.5).
        temperature: by which both logits are divided for it (default 2.0).
        pack: keep live blocks only when training has ended (default True), with `bits` and `rest` of the config. False
            leaves the weights dense, with zeros.

    Attributes:
        sparsity: measured share of dead blocks over all layers.

    Raises:
        TypeError, ValueError: for unknown options; at the start of training, when the model has no weight to prune,
            when the optimizer does not hold its weights, and under DeepSpeed or FSDP.
    """

    def __init__(
        self,
        step_size: int = 100,
        decay: int | float = 0.25,
        schedule: str = "cubic",
        initial_sparsity: float = 0.0,
        score: str = "fro",
        grow: str = "none",
        grow_fraction: float = 0.3,
        reset_optimizer_state: bool = True,
        compute: str = "auto",
        total_steps: int | None = None,
        teacher: nn.Module | str | os.PathLike | None = None,
        distill_weight: float = 0.5,
        temperature: float = 2.0,
        pack: bool = True,
    ):
        for field, value, allowed in (("schedule", schedule, SHAPES), ("score", score, SCORES),
                                      ("grow", grow, GROWTHS), ("compute", compute, COMPUTES)):  # fmt: skip
            if value not in allowed:
                raise ValueError(f"`{field}`={value!r} is not supported; use one of {list(allowed)}.")
        for field, value in (("step_size", step_size), ("total_steps", 1 if total_steps is None else total_steps)):
            if type(value) is not int or value < 1:
                raise ValueError(f"`{field}`={value!r} must be a positive integer.")
        check_number("decay", decay, "a number of steps, or a share in [0, 1)", lambda n: n >= 0 and
                     (isinstance(n, int) or n < 1))  # fmt: skip
        check_number("grow_fraction", grow_fraction, "a number in [0, 1)", lambda n: 0 <= n < 1)
        for field, value in (("reset_optimizer_state", reset_optimizer_state), ("pack", pack)):
            if value is not True and value is not False:
                raise TypeError(f"`{field}`={value!r} must be True or False.")
        self.step_size, self.decay, self.schedule = step_size, decay, schedule
        self.initial_sparsity = check_sparsity(initial_sparsity, "initial_sparsity")
        self.score, self.grow, self.grow_fraction = score, grow, grow_fraction
        self.reset_optimizer_state, self.compute = reset_optimizer_state, compute
        if teacher is not None and not isinstance(teacher, (nn.Module, str, os.PathLike)):
            raise TypeError(f"`teacher` must be a model, a folder or an id, got {type(teacher).__name__}.")
        check_number("distill_weight", distill_weight, "a number in [0, 1]", lambda n: 0 <= n <= 1)
        check_number("temperature", temperature, "a positive number", lambda n: 0 < n < float("inf"))
        self.teacher, self.distill_weight, self.temperature = teacher, distill_weight, temperature
        self.total_steps, self.pack = total_steps, pack
        self.pruner: BlockPruner | None = None
        self.sparsity = 0.0
        self._optimizer = None
        self._distillation: Distillation | None = None

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        inner = getattr(optimizer, "optimizer", optimizer)
        self._refuse(args, model, inner)
        plan = Schedule(
            self.total_steps or state.max_steps, self.step_size, self.decay, self.schedule, self.initial_sparsity,
            self.grow_fraction,
        )  # fmt: skip
        pruner = BlockPruner(model, plan, self.score, self.grow, self.reset_optimizer_state, self.compute)
        saved = inner.state.get(STATE_KEY)
        if saved is not None and state.global_step > 0:
            # the optimizer's state was loaded before training began: this is a resumed run
            pruner.load(saved["masks"])
            if saved["schedule"] != asdict(plan):
                logger.warning(
                    f"training was resumed with another schedule: it was {saved['schedule']}, it is {asdict(plan)}."
                )
        elif state.global_step > 0:
            logger.warning(
                "the checkpoint has no masks (it was saved without its optimizer): blocks that are zero are taken to "
                "be dead, so newly grown ones are lost."
            )
            for module in pruner.modules.values():
                settle_mask(module)
        pruner.attach()
        if self.teacher is not None:
            teacher = (
                self.teacher if isinstance(self.teacher, nn.Module) else type(model).from_pretrained(self.teacher)
            )
            self._distillation = Distillation(model, teacher, self.distill_weight, self.temperature)
        self.pruner, self._optimizer = pruner, inner
        self._keep_state()

    def on_step_begin(self, args, state, control, **kwargs):
        if self.pruner is not None:
            self.pruner.before_step(state.global_step + 1)

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self.pruner is not None and self.pruner.after_step(state.global_step + 1, self._optimizer):
            self._keep_state()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.pruner is None or logs is None or "loss" not in logs:
            return
        metrics = {"blast/sparsity": self.sparsity, "blast/pruned": self.pruner.pruned,
                   "blast/grown": self.pruner.grown}  # fmt: skip
        if self._distillation is not None:
            metrics["blast/distillation"] = self._distillation.last
        logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        pruner = self.pruner
        if pruner is None:
            return
        if self._distillation is not None:
            self._distillation.release()
            self._distillation = None
        replaced = [name for name, module in pruner.modules.items() if not module.mask_holds()]
        for name in replaced:
            settle_mask(pruner.modules[name])
        if replaced:
            logger.warning(
                f"the weights of {len(replaced)} layers, such as `{replaced[0]}`, were replaced while training ended "
                "(`load_best_model_at_end` may have done it): their masks are those of the weights now."
            )
        elif state.global_step < pruner.schedule.freeze:
            if state.global_step >= state.max_steps:
                logger.warning(
                    f"the schedule ends at step {pruner.schedule.freeze}, training ended at {state.global_step}: "
                    f"blocks are pruned from {pruner.sparsity:.1%} to the target at once, and nothing is trained "
                    "after it. Train longer, or lower `total_steps`."
                )
                pruner.finish(self._optimizer)
            else:
                logger.warning(
                    f"training stopped at step {state.global_step}, before the schedule ended: the model has "
                    f"{pruner.sparsity:.1%} of its blocks pruned, and that is what is saved."
                )
        self.sparsity = pruner.sparsity
        self._keep_state()
        pruner.release()
        if self.pack:
            quantizer = getattr(model, "hf_quantizer", None)
            if quantizer is not None:
                quantizer.pack(model)
            else:
                for module in pruner.modules.values():
                    pack_blocks(module)
        self.pruner = self._optimizer = None

    def _keep_state(self) -> None:
        self.sparsity = self.pruner.sparsity
        self._optimizer.state[STATE_KEY] = {"masks": self.pruner.state(), "schedule": asdict(self.pruner.schedule)}

    def _refuse(self, args, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError for what would train wrongly, or not at all."""
        modules = dict(masked_modules(model))
        if not modules:
            packed = any(isinstance(weight, BlockWeight) for _, weight in sparse_modules(model))
            raise ValueError(
                "BlastCallback has no weight to prune: "
                + (
                    "the model's layers hold live blocks only, whose mask is final. Leave the callback out to train "
                    "them as they are, or call hf_lowbit.quantize(model, BlastConfig(...)) to prune them further."
                    if packed
                    else "load the model with `BlastConfig`, or convert it with hf_lowbit.quantize."
                )
            )
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, module in modules.items():
            weight = module.parameter
            if weight.requires_grad and id(weight) not in held:
                raise ValueError(
                    f"`{name}.weight` is not in the Trainer's optimizer: it was made before the model was converted. "
                    "Make a new Trainer."
                )
        if getattr(args, "deepspeed", None):
            raise ValueError("`deepspeed` keeps weights and states in shards of its own; train with DDP instead.")
        if getattr(args, "fsdp", None) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
            raise ValueError("`fsdp` shards the weights whose blocks are compared; train with DDP (`fsdp`=None).")
