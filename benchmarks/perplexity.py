"""Perplexity of a causal language model on a fixed slice of text, and the paired difference of two models.

Protocol, the same for every figure of this project:

    text     one novel from its first token; tokenized whole, no beginning-of-text token added
    windows  non-overlapping, `length` tokens each, every window scored without what came before it
    scored   all tokens of a window but its first: length - 1
    NLL      mean over the window, from logits in the model's dtype and a log-softmax in float32
    ppl      exp(mean of the windows' NLL)

Two models read the same windows, so the windows' own difficulty, by far the largest part of the spread, cancels in
d_i = NLL_i(after) - NLL_i(before). The interval is Student's for the mean of d, n - 1 degrees of freedom; its
exponential is the interval of the ratio ppl(after) / ppl(before).
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_lowbit.compression.evaluate import nll_sum
from hf_lowbit.compression.evaluate import perplexity as perplexity_of


AUSTEN = Path(__file__).resolve().parents[1] / "tests" / "data" / "austen"

# calibration never reads the evaluation novels
CALIBRATION = ("emma", "sensesensibility")
EVALUATION = ("persuasion", "northangerabbey")

# 17 windows of 1,024 tokens score 17,391: the least that a claim rests on is 16k
LENGTH, COUNT = 1024, 17


def novel(name: str) -> str:
    return (AUSTEN / f"{name}.txt").read_text(encoding="utf-8")


def windows(tokenizer, text: str, length: int = LENGTH, count: int = COUNT) -> Tensor:
    """The first `count` windows of `length` tokens as [count, length]."""
    # a novel is longer than any context; the warning about that does not apply to windows of it
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(tokens) < length * count:
        raise ValueError(f"{count} windows of {length} tokens were asked for, but the text has {len(tokens)} tokens.")
    return torch.tensor(tokens[: length * count]).view(count, length)


@torch.inference_mode()
def window_nlls(model, batch: Tensor) -> Iterator[float]:
    """Mean negative log-likelihood of each window in nats, one window a forward pass."""
    model.eval()
    for window in batch.to(model.device):
        logits = model(input_ids=window[None], use_cache=False).logits[0, :-1]
        yield float(nll_sum(logits, window[1:])) / (len(window) - 1)


def perplexity(nlls: list[float]) -> float:
    return perplexity_of(statistics.fmean(nlls))


def student_quantile(degrees: int, probability: float = 0.975) -> float:
    """Student's t by the Cornish-Fisher expansion around the normal quantile; within 0.3% from 5 degrees upwards."""
    z = statistics.NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


@dataclass(frozen=True)
class Difference:
    """How much higher the NLL of `after` is, in nats a token, with its 95% interval."""

    mean: float
    low: float
    high: float

    @property
    def ratio(self) -> tuple[float, float, float]:
        """ppl(after) / ppl(before) and its 95% interval."""
        return math.exp(self.mean), math.exp(self.low), math.exp(self.high)


def paired(before: list[float], after: list[float]) -> Difference:
    """The mean of the paired differences and its 95% interval."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Difference(mean, -math.inf, math.inf)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    margin = student_quantile(len(differences) - 1) * error
    return Difference(mean, mean - margin, mean + margin)
