"""Sizes as users write them: averages of bits, and budgets."""

import math

import pytest

from hf_lowbit.configs.size import check_average, check_budget, parse_budget


@pytest.mark.parametrize(("budget", "size"), [("60MB", 60_000_000), ("2GiB", 2 << 30), ("40%", 400), ("1.5 kb", 1500),
                                              (123, 123), ("77", 77), (" 3 MiB ", 3 << 20), (0.25, 250)])  # fmt: skip
def test_a_budget_is_read(budget, size):
    assert parse_budget(budget, 1000) == size


@pytest.mark.parametrize(
    "budget",
    ["", "MB", "-3MB", "3 apples", "3ib", "3tb", "60M", "0", 0, -5, "0%", 0.0, 1.0, 1.5, -0.2, math.nan, math.inf],
)
def test_nonsense_is_refused_by_name(budget):
    with pytest.raises(ValueError, match="`budget`="):
        check_budget(budget)


@pytest.mark.parametrize("budget", [None, True, [1], 3 + 1j])
def test_other_types_are_refused(budget):
    with pytest.raises(TypeError, match="`budget`="):
        check_budget(budget)


@pytest.mark.parametrize("bits", [2.0, 3.2, 8.0])
def test_averages_that_have_a_plan(bits):
    check_average(bits)


@pytest.mark.parametrize("bits", [1.99, 8.01, -3.0, math.nan, math.inf])
def test_averages_that_have_none(bits):
    with pytest.raises(ValueError, match="is an average, which must lie between 2 and 8"):
        check_average(bits)
