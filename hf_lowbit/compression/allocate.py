"""Which scheme each weight gets: the least total cost whose bytes fit a budget (a multiple-choice knapsack).

    min sum_i cost_i(c_i)   with   sum_i bytes_i(c_i) <= budget

Dynamic programming over the budget in `UNITS` equal steps. Sizes are rounded up to whole steps, so the plan always
fits; it is the optimum among plans that would fit a budget smaller by one step a weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..configs.scheme import Scheme


UNITS = 20_000


@dataclass(frozen=True)
class Option:
    """One scheme of one weight: its bytes, and the loss that it is expected to add."""

    scheme: Scheme
    bytes: int
    cost: float


def smallest(options: list[list[Option]]) -> int:
    """Bytes of the smallest plan."""
    return sum(min(option.bytes for option in each) for each in options)


def allocate(options: list[list[Option]], budget: int) -> list[Option]:
    """One option for each weight. Raises ValueError when not even the smallest fit `budget` bytes."""
    least = smallest(options)
    if least > budget:
        raise ValueError(f"nothing fits {budget} bytes: the smallest plan takes {least}.")
    # what each weight takes at least is no choice; the steps divide the rest
    base = [min(option.bytes for option in each) for each in options]
    step = max(1, -(-(budget - least) // UNITS))
    units = (budget - least) // step
    best = torch.zeros(units + 1, dtype=torch.float64)
    choices = []
    for each, floor in zip(options, base, strict=True):
        found = torch.full_like(best, float("inf"))
        choice = torch.zeros(units + 1, dtype=torch.int16)
        for index, option in enumerate(each):
            width = -(-(option.bytes - floor) // step)
            if width > units:
                continue
            total = torch.full_like(best, float("inf"))
            total[width:] = best[: units + 1 - width] + option.cost
            better = total < found
            found = torch.where(better, total, found)
            choice[better] = index
        best = found
        choices.append(choice)
    left, plan = units, []
    for each, floor, choice in zip(reversed(options), reversed(base), reversed(choices), strict=True):
        option = each[int(choice[left])]
        left -= -(-(option.bytes - floor) // step)
        plan.append(option)
    return plan[::-1]
