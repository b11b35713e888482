"""What may be concluded from a few runs that reached a target: MLPerf's mean, and its test against luck.

    olympic mean    drop the best and the worst run, average the rest; a run that never arrived is the worst; two such
                    runs, and there is no result (training_rules.adoc, "Scoring")
    reference       2N runs of the reference give points; with their olympic mean mu and the deviation sigma of the
    convergence     points that are kept, the mean of n kept runs must not lie below
    points          mu - t(0.95, n_ref + n - 2) sigma sqrt(1 / n_ref + 1 / n)
                    (the same, "Reference convergence points": a one-sided t-test of two samples, p = 0.05)

A method that arrives after fewer samples than that did something else than the reference: it was lucky, or its task is
another one. One that is faster than the mean and within the limit gets no credit for it: its time is multiplied by mu
over its own mean. mlperf-logging's `rcp_checker` takes sigma over all points where the rules say the kept ones; here
it is as the rules say.
"""

import math
import statistics
from typing import NamedTuple


def kept(values: list[float]) -> list[float]:
    """Without the smallest and the largest. ValueError for less than three."""
    if len(values) < 3:
        raise ValueError(f"an olympic mean needs at least 3 runs, there are {len(values)}.")
    return sorted(values)[1:-1]


def olympic(values: list[float]) -> float:
    """The mean of `kept(values)`; infinite when more than one run did not arrive (math.inf)."""
    return statistics.fmean(kept(values))


class Verdict(NamedTuple):
    """`accepted`: not faster than luck allows. `factor`: what its time is multiplied by (at least 1)."""

    accepted: bool
    mean: float
    reference: float
    fastest: float
    factor: float


def can_compare(reference: list[float], runs: list[float]) -> bool:
    """Whether the kept runs leave a degree of freedom for the spread."""
    return min(len(reference), len(runs)) >= 3 and len(reference) + len(runs) >= 7


def compare_with_reference(reference: list[float], runs: list[float], p: float = 0.05) -> Verdict:
    """The verdict on samples-to-target of `runs`, against those of the reference. ValueError for too few of both."""
    from scipy import stats

    points, own = kept(reference), kept(runs)
    mu, mean = statistics.fmean(points), statistics.fmean(own)
    if not math.isfinite(mu):
        raise ValueError("the reference itself did not reach the target in more than one run; set an easier target.")
    if not can_compare(reference, runs):
        raise ValueError(f"{len(reference)} and {len(runs)} runs are too few: a spread needs 7 in all, and 3 of each.")
    spread = statistics.pstdev(points) * math.sqrt(1 / len(points) + 1 / len(own))
    fastest = mu - float(stats.t.ppf(1 - p, len(points) + len(own) - 2)) * spread
    accepted = math.isfinite(mean) and mean >= fastest
    return Verdict(accepted, mean, mu, fastest, max(1.0, mu / mean) if mean else math.inf)
