"""Global stage: the whole low-bit model is tuned until its predictions match the dense model's.

    min over scales, norms, biases    mean over tokens KL(softmax(dense logits) || softmax(logits))

at temperature 1, codes fixed (the end-to-end stage of EfficientQAT, Chen et al. 2024, section 3.3, with distillation
in place of labels). Models without logits match their last hidden state, or their embeddings (CLIP):
|h - h_dense|^2 / |h_dense|^2 a token.

The loss on held-out batches, of the low-bit model as it is stored, is taken before the first step and at regular
intervals; the tensors of the best are what remains, bit for bit, and the start is one of the candidates.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging

from ..calls import Batch, forward, outcome, undisturbed
from .blocks import check
from .calls import mask_of, relative_error
from .tuning import Snapshot, Tuning


# rows of logits at a time: a float32 copy of all logits of a large vocabulary would be the largest tensor of the run
ROWS = 512


@dataclass(frozen=True)
class GlobalResult:
    """Held-out loss in nats (or relative squared error) before and of what was kept, and the step that it is from."""

    before: float
    after: float
    step: int
    losses: tuple[tuple[int, float], ...]


def refine_globally(
    model: nn.Module,
    dense: nn.Module,
    batches: list[Batch],
    held_out: list[Batch],
    *,
    steps: int = 100,
    learning_rate: float = 5e-4,
    checks: int = 4,
    seed: int = 0,
) -> GlobalResult:
    """Distil `dense` into the low-bit `model`, in place. Never worse than the start on `held_out`.

    Args:
        model, dense, batches, held_out, seed: as for `refine_blocks`.
        steps: updates, one batch each. learning_rate: of Adam, relative for scales; falls linearly to zero.
        checks: how many times the held-out loss is taken on the way.

    Raises ValueError for empty `batches` or `held_out`, `steps` below 1, a model without low-bit weights, and a model
    that gives neither logits nor hidden states.
    """
    check(batches, held_out, steps)
    with undisturbed(model, dense):
        tuning = Tuning(model, dense, rounding=False, rate=learning_rate, steps=steps)
        tensors = tuning.tensors()

        @torch.no_grad()
        def judge() -> float:
            losses = [float(loss(forward(model, b), forward(dense, b), b)) for b in held_out]
            return sum(losses) / len(losses)

        before = judge()
        best, best_step, kept, losses = before, 0, Snapshot(tensors), [(0, before)]
        order, rows = random.Random(seed), []
        every = max(1, steps // max(1, checks))
        for step in logging.tqdm(range(1, steps + 1), desc="Refining the whole model"):
            if not rows:
                rows = order.sample(batches, len(batches))
            batch = rows.pop()
            with torch.no_grad():
                wanted = forward(dense, batch)
            loss(forward(model, batch, tuning.run), wanted, batch).backward()
            tuning.step(0.0)
            if step % every == 0 or step == steps:
                tuning.store()
                losses.append((step, judge()))
                if losses[-1][1] < best:
                    best, best_step, kept = losses[-1][1], step, Snapshot(tensors)
        kept.restore()
    return GlobalResult(before, best, best_step, tuple(losses))


def loss(output, wanted, batch: Batch) -> Tensor:
    """How far `output` of the low-bit model is from `wanted` of the dense one, a scalar."""
    (is_logits, values), (_, targets) = outcome(output), outcome(wanted)
    masks = [mask_of(batch, t.shape, "decoder_attention_mask" in batch) if t.ndim == 3 else None for t in targets]
    if not is_logits:
        parts = [relative_error(v, t, mask) for v, t, mask in zip(values, targets, masks, strict=True)]
        return torch.stack(parts).mean()
    value, target, mask = values[0], targets[0], masks[0]
    keep = None if mask is None else mask.to(target.device).reshape(-1).bool()
    value, target = (t.reshape(-1, t.shape[-1]) for t in (value, target))
    if keep is not None and not bool(keep.all()):
        value, target = value[keep], target[keep]
    parts = zip(value.split(ROWS), target.split(ROWS), strict=True)
    total = sum(
        F.kl_div(v.float().log_softmax(-1), t.float().log_softmax(-1), reduction="sum", log_target=True)
        for v, t in parts
    )
    return total / len(value)
