"""How sparse the weights are at each step, and at which steps blocks are pruned and grown.

With T steps in all, the mask frozen for the last d of them, and the target s_max (Zhu & Gupta 2017, as BLaST has it):

    cubic     s_i = s_max + (s_0 - s_max) (1 - i / (T - d))^3      i <= T - d
    linear    s_i = s_max + (s_0 - s_max) (1 - i / (T - d))
    s_i = s_max after that.

Masks change at every multiple of `step_size` before T - d, and for the last time at T - d itself: a prune to exactly
s_max without growth. Under "budget" growth a share alpha/2 (1 + cos(pi i / (T - d))) of the live blocks is grown, as
in RigL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


SHAPES = ("cubic", "linear")


@dataclass(frozen=True)
class Schedule:
    """`total` steps in all, of which the last `decay` (a number, or a share of all) have a frozen mask."""

    total: int
    step_size: int = 100
    decay: int | float = 0.25
    shape: str = "cubic"
    initial: float = 0.0
    grow_fraction: float = 0.3

    @property
    def freeze(self) -> int:
        """The step after which the mask stays."""
        tail = self.decay if isinstance(self.decay, int) else round(self.decay * self.total)
        return max(1, self.total - tail)

    def sparsity(self, step: int, target: float) -> float:
        """Share of dead blocks after `step` steps; never above `target`, never below where it started."""
        if step >= self.freeze:
            return target
        left = 1 - step / self.freeze
        return target + min(self.initial - target, 0.0) * (left**3 if self.shape == "cubic" else left)

    def updates(self, step: int) -> bool:
        """Whether masks change after step number `step` (counted from 1)."""
        return step == self.freeze or (step < self.freeze and step % self.step_size == 0)

    def grown(self, step: int) -> float:
        """Share of the live blocks that is grown at an update; none at the last one."""
        if step >= self.freeze:
            return 0.0
        return self.grow_fraction / 2 * (1 + math.cos(math.pi * step / self.freeze))
