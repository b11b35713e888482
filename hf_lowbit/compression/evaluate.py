"""Quality of a model on batches that hold labels: perplexity where they are tokens, the model's own loss elsewhere.

    NLL   sum over labelled tokens of -log softmax(logits)[label] / number of labelled tokens
    ppl   exp(NLL)

A label of -100 is not scored. Logits are in the model's dtype, the log-softmax is in float32. Where labels come from:

    strided_windows   causal models: windows of `length` tokens that begin `stride` apart; each token is scored once,
                      with at least length - stride tokens before it (none where stride = length: independent windows);
                      the first token of the text is never scored
    mask_tokens       masked models: a share of the tokens, drawn by a seed, is replaced by the mask token and scored
                      (pseudo-likelihood of that share, not the perplexity of a causal model)
    any data set      sequence-to-sequence and classification models: the labels that it has
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from .calls import Batch, forward, undisturbed


IGNORED = -100
# of the tokens of masked models, as BERT was trained
SHARE = 0.15
# rows of logits at a time: a float32 copy of all logits of a large vocabulary would be the largest tensor of the run
ROWS = 256


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats, over `count` tokens (or examples), and the loss of each batch. `metric` is "perplexity" for
    labels that are tokens, else "loss"."""

    metric: str
    loss: float
    count: int
    losses: tuple[float, ...]

    @property
    def value(self) -> float:
        """The figure that `metric` names; infinite where the exponential overflows."""
        return perplexity(self.loss) if self.metric == "perplexity" else self.loss


def perplexity(loss: float) -> float:
    """exp(loss); infinity where it overflows: a broken model."""
    return math.exp(loss) if loss < 700 else math.inf


def nll_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the negative log-likelihoods of `labels` [T] under `logits` [T, V], in float32; -100 counts nothing."""
    parts = zip(logits.split(ROWS), labels.split(ROWS), strict=True)
    return sum(F.cross_entropy(part.float(), label, ignore_index=IGNORED, reduction="sum") for part, label in parts)


def strided_windows(tokens: Tensor, length: int, stride: int | None = None) -> list[Batch]:
    """Windows of `tokens` [T] as batches of one row, with labels. `stride` None is `length`.

    The last window may be shorter. Raises ValueError for fewer than two tokens, `length` below 2, and `stride` outside
    1..length.
    """
    stride = length if stride is None else stride
    if tokens.numel() < 2:
        raise ValueError(f"{tokens.numel()} token(s) are not enough: the first is context, and one must be scored.")
    if length < 2:
        raise ValueError(f"`length`={length} must be at least 2: one token is context.")
    if not 1 <= stride <= length:
        raise ValueError(f"`stride`={stride} must lie between 1 and `length`={length}.")
    batches, scored = [], 0
    for start in range(0, tokens.numel(), stride):
        row = tokens[start : start + length]
        labels = row.clone()
        # a token whose window before had it is context here, and so is the first of each window
        labels[: max(1, scored - start)] = IGNORED
        scored = start + row.numel()
        if bool((labels != IGNORED).any()):
            batches.append({"input_ids": row[None], "labels": labels[None]})
        if scored == tokens.numel():
            break
    return batches


def mask_tokens(batches: Iterable[Batch], mask_token_id: int, share: float = SHARE, seed: int = 0) -> list[Batch]:
    """The batches with a `share` of each row's tokens replaced by the mask token, and labels for those alone.

    Padding is never masked; what is drawn depends on `seed` alone. Raises ValueError when nothing was drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    masked = []
    for batch in batches:
        ids = batch["input_ids"]
        drawn = torch.rand(ids.shape, generator=generator) < share
        if "attention_mask" in batch:
            drawn &= batch["attention_mask"].bool()
        labels = ids.masked_fill(~drawn, IGNORED)
        masked.append({**batch, "input_ids": ids.masked_fill(drawn, mask_token_id), "labels": labels})
    if not any(bool((batch["labels"] != IGNORED).any()) for batch in masked):
        raise ValueError(f"`share`={share} of so few tokens drew none; give more text.")
    return masked


def labelled(batches: Iterable[Batch], model: nn.Module, tokenizer, length: int, seed: int = 0) -> list[Batch]:
    """Batches that `evaluate` can score: those with labels as they are, rows of plain token ids by the model's kind.

    Causal models get `strided_windows` of `length` tokens, masked models `mask_tokens`. Raises ValueError for other
    kinds, and for rows that are more than token ids but have no labels.
    """
    found: list[Batch] = []
    for batch in batches:
        if "labels" in batch:
            found.append(batch)
            continue
        if set(batch) - {"input_ids", "attention_mask"} or "input_ids" not in batch:
            raise ValueError(f"rows of {sorted(batch)} can't be scored without `labels`.")
        if type(model).__name__ in _causal_classes(model):
            found += [w for row in batch["input_ids"] for w in strided_windows(row, length)]
        elif type(model).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
            mask = getattr(tokenizer, "mask_token_id", None)
            if mask is None:
                raise ValueError(f"{type(model).__name__} is scored by masked tokens: there is no tokenizer's mask.")
            found += mask_tokens([batch], mask, seed=seed + len(found))
        else:
            raise ValueError(f"{type(model).__name__} can't be scored on plain tokens: pass rows with `labels`.")
    return found


def scoring(batches: list[Batch], model: nn.Module, length: int) -> str:
    """How `labelled` and `evaluate` score rows of data, in words."""
    if "labels" in batches[0]:
        return "the labels of the rows"
    if type(model).__name__ in _causal_classes(model):
        return f"windows of {length} tokens that do not overlap, all tokens of a window but its first"
    return f"{SHARE:.0%} of the tokens masked, these alone (pseudo-perplexity)"


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch]) -> Evaluation:
    """Loss of `model` on `batches`, keyword arguments of its forward with `labels`. Changes nothing about the model.

    Labels of at least two dimensions are token ids: [B, T], scored against logits [B, T, V], for causal models against
    the logits one place before. Others go to the model, whose own loss is averaged over examples.

    Raises ValueError when there are no batches, no `labels`, nothing to score, or the model gives no loss.
    """
    losses: list[float] = []
    counts: list[int] = []
    metric = "perplexity"
    shifted = type(model).__name__ in _causal_classes(model)
    with undisturbed(model), torch.no_grad():
        for number, batch in enumerate(batches):
            labels = batch.get("labels")
            if labels is None:
                raise ValueError(
                    f"batch {number} holds no `labels`: {type(model).__name__} cannot be evaluated on it."
                )
            if labels.ndim >= 2 and not labels.is_floating_point():
                total, count = _token_loss(model, batch, shifted)
            else:
                metric, count = "loss", len(labels)
                loss = getattr(forward(model, batch), "loss", None)
                if loss is None:
                    raise ValueError(f"{type(model).__name__} gives no loss for its `labels`.")
                total = float(loss) * count
            if count:
                losses.append(total / count)
                counts.append(count)
    if not losses:
        raise ValueError("there is nothing to score: no batches, or no label but -100.")
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    return Evaluation(metric, mean, sum(counts), tuple(losses))


def _token_loss(model: nn.Module, batch: Batch, shifted: bool) -> tuple[float, int]:
    labels = batch["labels"]
    # causal and masked models need labels for their loss only, and would form a second float32 copy of the logits
    needs_labels = getattr(model.config, "is_encoder_decoder", False)
    given = batch if needs_labels else {key: value for key, value in batch.items() if key != "labels"}
    logits = forward(model, given).logits
    labels = labels.to(logits.device)
    if "attention_mask" in batch and batch["attention_mask"].shape == labels.shape and not needs_labels:
        labels = labels.masked_fill(batch["attention_mask"].to(labels.device) == 0, IGNORED)
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    labels = labels.reshape(-1)
    return float(nll_sum(logits.reshape(-1, logits.shape[-1]), labels)), int((labels != IGNORED).sum())


def _causal_classes(model: nn.Module) -> set[str]:
    """Class names whose logits at a place are about the next token. Encoder-decoders shift their labels themselves."""
    if getattr(model.config, "is_encoder_decoder", False):
        return set()
    masked = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if "MaskedLM" in name}
    return set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - masked | (
        {type(model).__name__} if type(model).__name__.endswith("ForConditionalGeneration") else set()
    )
