"""What a user sees of direct training: how many codes move, how far, how many sit at the grid's edge, how scales
drift.

    dqt/changed_rate      share of the codes that a step changes, mean over the steps since the last log
    dqt/step_levels       levels that a step asks for per code, mean
    dqt/saturation_rate   share of the codes at the smallest or largest value
    dqt/scale_drift       mean |log(s / s at the start)| of learned scales
    dqt/skipped_steps     steps skipped for gradients that are no numbers
    dqt/changed_rate/<weight>, dqt/saturation_rate/<weight>     the same, weight by weight, where asked for

Codes have to move, and not all of them at once. Below `TOO_FEW` changes nothing is learned; a mean step beyond
`TOO_FAR` of the grid's range throws away where the codes were. Both are a matter of the learning rate, and the
warning says so with numbers.
"""

from __future__ import annotations

from transformers.utils import logging

from .leaves import Leaf, ScaleLeaf
from .updater import Step, Updater


logger = logging.get_logger(__name__)

TOO_FEW = 1e-5
# share of the grid's range; a ternary grid has two levels, an 8-bit grid 255
TOO_FAR = 0.1
# a single step says little
STEPS_BEFORE_WARNING = 5


class Monitor:
    """Sums what `Updater.step` reports until `collect` turns it into metrics."""

    def __init__(self, updater: Updater, per_weight: bool = False):
        self.updater, self.per_weight = updater, per_weight
        self.start = {leaf.name: leaf.parameter.detach().clone() for leaf in self._scales()}
        self.skipped = 0
        self._warned: set[str] = set()
        self._reset()

    def record(self, step: Step) -> None:
        """Add a step."""
        if step.skipped:
            self.skipped += 1
            return
        self.steps += 1
        for name, moved in step.moved.items():
            changed, levels = self.totals.get(name, (0, 0.0))
            self.totals[name] = (changed + moved.changed, levels + moved.levels)

    def collect(self, lr: float) -> dict[str, float]:
        """Metrics since the last call, and warnings where they are out of a sensible band."""
        metrics: dict[str, float] = {"dqt/skipped_steps": self.skipped}
        leaves = [leaf for leaf in self.updater.codes() if leaf.name in self.totals]
        count = sum(leaf.all_rows * leaf.columns for leaf in leaves)
        if self.steps and count:
            changed = sum(self.totals[leaf.name][0] for leaf in leaves)
            levels = sum(self.totals[leaf.name][1] for leaf in leaves)
            saturated = {leaf.name: leaf.saturated() for leaf in leaves}
            metrics["dqt/changed_rate"] = changed / count / self.steps
            metrics["dqt/step_levels"] = levels / count / self.steps
            metrics["dqt/saturation_rate"] = sum(saturated.values()) / count
            share = sum(self.totals[leaf.name][1] / leaf.grid.levels for leaf in leaves) / count / self.steps
            self._warn(metrics["dqt/changed_rate"], share, lr)
            for leaf in leaves if self.per_weight else ():
                size = leaf.all_rows * leaf.columns
                metrics[f"dqt/changed_rate/{leaf.name}"] = self.totals[leaf.name][0] / size / self.steps
                metrics[f"dqt/saturation_rate/{leaf.name}"] = saturated[leaf.name] / size
        if self.start:
            drifts = [
                (leaf.parameter.detach().float() / self.start[leaf.name].float()).log() for leaf in self._scales()
            ]
            metrics["dqt/scale_drift"] = float(sum(d.abs().mean() for d in drifts) / len(drifts))
        self._reset()
        return metrics

    def _reset(self) -> None:
        self.steps = 0
        self.totals: dict[str, tuple[int, float]] = {}

    def _scales(self) -> list[Leaf]:
        return [leaf for leaf in self.updater.leaves.values() if isinstance(leaf, ScaleLeaf)]

    def _warn(self, changed: float, share: float, lr: float) -> None:
        if self.steps < STEPS_BEFORE_WARNING or lr == 0:
            return
        if changed < TOO_FEW and "few" not in self._warned:
            self._warned.add("few")
            logger.warning(
                f"direct training: a step changes {changed:.1e} of the codes, less than {TOO_FEW:.0e}: almost "
                f"nothing is learned at learning rate {lr:.1e}. Raise it (ternary weights want 3 to 10 times a float "
                "model's), or use smaller scales (`group_size`) or more bits."
            )
        if share > TOO_FAR and "far" not in self._warned:
            self._warned.add("far")
            logger.warning(
                f"direct training: a step moves a code by {share:.0%} of its grid's range on average, more than "
                f"{TOO_FAR:.0%}: codes forget where they were at learning rate {lr:.1e}. Lower it or lengthen "
                "the warmup."
            )
