"""The olympic mean is the official function's, and the t-test reproduces the rules' worked example."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.convergence import can_compare, compare_with_reference, olympic


# points of the rules' example: kept ones have mean 15.75 and deviation 0.433
POINTS = [15.0, 15.0, 15.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 17.0]


@given(st.lists(st.floats(0.01, 1e6), min_size=3, max_size=12), st.booleans())
@settings(max_examples=100, deadline=None)
def test_olympic_mean_is_the_official_one(values, one_missing):
    summarizer = pytest.importorskip("mlperf_logging.result_summarizer.result_summarizer")
    values = [*values, math.inf] if one_missing else values
    official = summarizer._compute_olympic_average(sorted(values), 0, 1)
    assert olympic(values) == pytest.approx(official, rel=1e-12)


def test_two_runs_that_never_arrive_are_no_result():
    assert olympic([1.0, 2.0, 3.0, math.inf]) == 2.5
    assert olympic([1.0, 2.0, math.inf, math.inf]) == math.inf
    with pytest.raises(ValueError, match="at least 3 runs"):
        olympic([1.0, 2.0])


def test_the_worked_example_of_the_rules():
    pytest.importorskip("scipy")
    passes = compare_with_reference(POINTS, [15.0, 15.0, 15.5, 15.5, 16.0])
    assert passes.reference == 15.75 and passes.fastest == pytest.approx(15.213, abs=5e-4)
    assert passes.accepted and passes.factor == pytest.approx(15.75 / (46 / 3))
    fails = compare_with_reference(POINTS, [14.0, 15.0, 15.0, 15.0, 16.0])
    assert not fails.accepted and fails.mean == 15.0
    slow = compare_with_reference(POINTS, [17.0, 18.0, 19.0, 20.0, 21.0])
    assert slow.accepted and slow.factor == 1.0
    assert not compare_with_reference(POINTS, [15.5, 15.5, math.inf, math.inf]).accepted
    with pytest.raises(ValueError, match="reference itself"):
        compare_with_reference([1.0, math.inf, math.inf], [1.0, 1.0, 1.0])


def test_too_few_runs_have_no_verdict():
    # one kept run of each leaves no spread: nothing may be called luck
    assert not can_compare([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    with pytest.raises(ValueError, match="too few"):
        compare_with_reference([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    assert compare_with_reference([1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0]).accepted
