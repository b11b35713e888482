"""Decode speed of two models side by side: `generate`, greedy, batch 1, with its key-value cache.

A step runs from one token that `generate` hands to its streamer to the next one: everything a user waits for, Python
included, and not the reading of the prompt. Machines drift (frequency, neighbours), so the models take turns, a few
steps each, many times. A turn gives one median step a model; the ratio is the median over the turns of the two
models' medians divided: slow drift cancels within a turn, a disturbed turn does not count.
"""

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):
    """Notes when `generate` hands over each token; the first call is the prompt."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def prefill(self) -> float:
        """Seconds from the prompt to the first token."""
        return self.times[1] - self.times[0]

    def steps(self, skip: int = 2) -> list[float]:
        """Seconds between tokens, without the prompt and the first steps, which allocate."""
        tokens = self.times[1 + skip :]
        return [later - earlier for earlier, later in zip(tokens, tokens[1:], strict=False)]


def timed(model, prompt: Tensor, steps: int) -> Clock:
    """One `generate` after `prompt` [1, T]; `Clock.steps` has `steps` entries."""
    clock = Clock()
    length = steps + 3
    prompt = prompt.to(model.device)
    # an end-of-text token must not end the measurement: min_new_tokens suppresses it
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=length,
        max_new_tokens=length,
        streamer=clock,
    )
    return clock


def median_step(model, prompt: Tensor, steps: int) -> float:
    """Seconds of the median decode step after `prompt` [1, T]."""
    return statistics.median(timed(model, prompt, steps).steps())


@dataclass(frozen=True)
class Comparison:
    """Median tokens per second of both models, and how many times faster `after` is, with the range over turns."""

    before: float
    after: float
    ratio: float
    slowest: float
    fastest: float


def compare(before, after, prompt: Tensor, turns: int = 9, steps: int = 10) -> Comparison:
    for model in (before, after):
        # kernels are chosen and caches filled before anything counts
        median_step(model.eval(), prompt, 2)
    return comparison([[median_step(model, prompt, steps) for model in (before, after)] for _ in range(turns)])


def comparison(medians: list[list[float]], tokens: int = 1) -> Comparison:
    """Of the seconds of both models in each turn, for `tokens` tokens."""
    ratios = [dense / lowbit for dense, lowbit in medians]
    dense, lowbit = (statistics.median(column) for column in zip(*medians, strict=True))
    return Comparison(tokens / dense, tokens / lowbit, statistics.median(ratios), min(ratios), max(ratios))
