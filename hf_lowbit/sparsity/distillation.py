"""Distillation from the dense model while blocks go: part of the loss is how far the outputs are from a teacher's.

    L = (1 - w) L_labels + w T^2 sum_i KL(softmax(t_i / T) || softmax(s_i / T)) / n

t and s are the logits of teacher and student at the positions i whose labels count, n their number (Hinton, Vinyals,
Dean 2015, section 2). Where the Trainer counts labels over several passes (accumulation), n is its count, as for the
loss of the labels.

The loss is changed by a hook on the model's own forward, so any Trainer whose model returns a loss takes part: DDP,
accumulation, checkpointing and autocast need nothing more. Evaluation is left alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


# what only a loss needs
OF_THE_LOSS = ("labels", "num_items_in_batch")


def distillation_loss(
    student: Tensor, teacher: Tensor, counts: Tensor | None, temperature: float, count: Tensor | float | None = None
) -> Tensor:
    """T^2 KL(teacher || student), a float32 scalar, for logits [..., C].

    `counts` bool [...]: the positions that take part (None: all). `count`: what the sum is divided by; None: their
    number. Raises ValueError for logits of other shapes.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"the teacher's logits have shape {tuple(teacher.shape)}, the model's {tuple(student.shape)}: they must "
            "read the same tokens and name the same classes."
        )
    own = F.log_softmax(student.float() / temperature, dim=-1)
    wanted = F.log_softmax(teacher.float() / temperature, dim=-1)
    divergence = F.kl_div(own, wanted, reduction="none", log_target=True).sum(-1)
    if counts is not None:
        divergence = divergence.masked_fill(~counts, 0.0)
    if count is None:
        count = divergence.numel() if counts is None else counts.sum().clamp(min=1)
    return temperature**2 * divergence.sum() / count


class Distillation:
    """Mixes the distillation loss into the loss of `model` while it is trained, until `release`.

    Args:
        model: the student: its forward returns `loss` and `logits`.
        teacher: a model that takes the same inputs; moved to the student's device, never trained.
        weight: w in [0, 1]. temperature: T > 0.

    Attributes:
        last: the distillation loss of the last pass, a number.
    """

    def __init__(self, model: nn.Module, teacher: nn.Module, weight: float, temperature: float):
        self.teacher = teacher.eval().requires_grad_(False).to(next(model.parameters()).device)
        self.weight, self.temperature = weight, temperature
        self.last = 0.0
        self._shifts = getattr(model, "loss_type", None) == "ForCausalLM"
        self._hook = model.register_forward_hook(self._mix, with_kwargs=True)

    def release(self) -> None:
        """Leave the model's loss as it was."""
        self._hook.remove()

    @torch.compiler.disable
    def _mix(self, model: nn.Module, args, kwargs, output):
        if not (model.training and torch.is_grad_enabled()):
            return None
        loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
        if loss is None or logits is None:
            raise ValueError(
                f"`teacher`: {type(model).__name__} returned no loss to distill into. `label_smoothing_factor` and "
                "`compute_loss_func` form it outside of the model: leave them out."
            )
        with torch.no_grad():
            told = self.teacher(*args, **{k: v for k, v in kwargs.items() if k not in OF_THE_LOSS}).logits
        counts = self._counts(kwargs.get("labels"), logits)
        if self._shifts:
            # the last position predicts nothing that is known
            logits, told = logits[:, :-1], told[:, :-1]
        mixed = distillation_loss(logits, told, counts, self.temperature, kwargs.get("num_items_in_batch"))
        self.last = float(mixed.detach())
        output["loss"] = (1 - self.weight) * loss + self.weight * mixed.to(loss.dtype)
        return output

    def _counts(self, labels: Tensor | None, logits: Tensor) -> Tensor | None:
        if labels is None or labels.is_floating_point() or labels.shape != logits.shape[:-1]:
            return None
        return (labels[:, 1:] if self._shifts else labels) != -100
