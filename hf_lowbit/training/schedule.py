"""The learning rate of large batches: linear warmup, then a polynomial to almost nothing, as the Trainer has it.

    lr(t) = peak t / warmup                                             t < warmup
    lr(t) = (peak - end) (1 - (t - warmup) / (steps - warmup))^power + end

Yamazaki et al. (arXiv 1903.12650) warm up since the start is where a large batch diverges, and tried several shapes of
decay; MLPerf fixed power 2 and end 1e-4 for ResNet-50 with LARS (training_rules.adoc, up to v4.0), with the peaks of
`resnet_rate`. Label smoothing, the paper's other measure, is `TrainingArguments(label_smoothing_factor=0.1)`.
"""

from __future__ import annotations


# batch below -> (peak, warmup epochs) of the MLPerf ResNet-50 reference (lars_util.py)
RESNET_RATES = ((16_384, 10.0, 5), (32_768, 25.0, 5), (None, 31.2, 25))


def warmup_polynomial(
    learning_rate: float, max_steps: int, warmup_steps: int, power: float = 2.0, end: float = 1e-4
) -> dict:
    """Keyword arguments for `TrainingArguments(**...)`: steps, peak and schedule.

    Args:
        learning_rate: the peak. max_steps: optimizer steps of the whole run. warmup_steps: how many of them warm up.
        power, end: of the polynomial.

    Raises:
        ValueError: when the warmup does not end before the run, or the peak is not above `end`.
    """
    if not 0 <= warmup_steps < max_steps:
        raise ValueError(f"`warmup_steps`={warmup_steps!r} must be at least 0 and below `max_steps`={max_steps!r}.")
    if not 0 <= end < learning_rate:
        raise ValueError(f"`end`={end!r} must be at least 0 and below `learning_rate`={learning_rate!r}.")
    if power <= 0:
        raise ValueError(f"`power`={power!r} must be above 0.")
    return {
        "learning_rate": learning_rate,
        "max_steps": max_steps,
        "warmup_steps": warmup_steps,
        "lr_scheduler_type": "polynomial",
        "lr_scheduler_kwargs": {"power": power, "lr_end": end},
    }


def resnet_rate(batch: int) -> tuple[float, int]:
    """(peak learning rate, warmup epochs) that MLPerf's reference gives LARS for ResNet-50 at a global batch."""
    if batch < 1:
        raise ValueError(f"`batch`={batch!r} must be at least 1.")
    return next((rate, epochs) for below, rate, epochs in RESNET_RATES if below is None or batch < below)
