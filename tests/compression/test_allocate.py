"""Plans against brute force."""

import itertools
import random

import pytest

from hf_lowbit.compression.allocate import UNITS, Option, allocate, smallest
from hf_lowbit.configs.scheme import Scheme


SCHEMES = [Scheme(bits, None) for bits in (2, 3, 4, 8)]


def problem(seed, weights=5):
    draw = random.Random(seed)
    options = []
    for _ in range(weights):
        size, cost = draw.randint(1_000, 90_000), draw.random()
        options.append([Option(s, size * s.bits // 8, cost * 4.0**-s.bits * draw.uniform(0.5, 2)) for s in SCHEMES])
    return options


def brute(options, budget):
    plans = (p for p in itertools.product(*options) if sum(o.bytes for o in p) <= budget)
    return min(sum(o.cost for o in p) for p in plans)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_is_the_best_one(seed):
    options = problem(seed)
    least, most = smallest(options), sum(each[-1].bytes for each in options)
    budget = least + (most - least) * (1 + seed % 7) // 8
    plan = allocate(options, budget)
    cost = sum(o.cost for o in plan)
    assert [o in each for o, each in zip(plan, options, strict=True)] == [True] * len(plan)
    assert sum(o.bytes for o in plan) <= budget
    # sizes are rounded up to steps: what it promises is the optimum of a slightly smaller budget
    step = -(-(budget - least) // UNITS)
    assert brute(options, budget) <= cost + 1e-12 and cost <= brute(options, budget - step * len(options)) + 1e-12


def test_exactly_the_smallest_and_more_than_enough():
    options = problem(3)
    assert [o.scheme.bits for o in allocate(options, smallest(options))] == [2] * 5
    assert sum(o.cost for o in allocate(options, 10**9)) == sum(min(o.cost for o in each) for each in options)


def test_too_little_is_refused_with_the_smallest_size():
    options = problem(4)
    with pytest.raises(ValueError, match=str(smallest(options))):
        allocate(options, smallest(options) - 1)


def test_no_weights():
    assert allocate([], 10) == []
