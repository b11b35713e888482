"""Stochastic rounding in delta form: exact probabilities, no-ops, clamping."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_lowbit.functional.grid import BITS, grid_of
from hf_lowbit.functional.noise import column_words, key_of, row_words, uniform, words
from hf_lowbit.functional.stochastic import apply_step, round_step


SIGMAS = 5.3
# u takes multiples of 2^-31, rounded to float32
RESOLUTION = 2.0**-31
STEPS = [0.5, -0.5, 0.3, -0.3, 1.0, -2.0, 1.25, -3.75, 12.5, 0.999, -0.001, 1e-4, 3e-6, -3e-6, 1e-7]


def probability_of_moving_further(step):
    """Exact: how many of the 2^31 noise values move `step` by one level more than its whole part."""
    fraction = abs(torch.tensor(step, dtype=torch.float32).item()) % 1.0
    low, high = 0, 2**31
    # the noise is monotone in its integer, so the border can be found by bisection
    while low < high:
        middle = (low + high) // 2
        u = uniform(torch.tensor([middle], dtype=torch.int64).to(torch.int32))
        levels = round_step(torch.tensor([step]), u).abs().item()
        if levels > math.floor(abs(step)):
            low = middle + 1
        else:
            high = middle
    return low / 2**31, fraction


@pytest.mark.parametrize("step", STEPS)
def test_probability_is_the_fraction(step):
    """By counting every noise value: no sampling error."""
    found, expected = probability_of_moving_further(step)
    # float32 spacing of |step| - u near the border, or that of u
    assert abs(found - expected) <= max(RESOLUTION, 2.0**-23 * max(abs(step), expected))


@pytest.mark.parametrize("step", [1e-5, -1e-5, 1e-3, -0.25, 0.75, 2.5], ids=str)
def test_mean_of_many_roundings(step):
    """The real noise, not an ideal one: within sampling error of the step."""
    key = key_of(3, 7, "w")
    u = uniform(words(row_words(key, 0, 2000), column_words(key, 2000)))
    levels = round_step(torch.full_like(u, step), u).double()
    fraction = abs(step) % 1
    error = SIGMAS * math.sqrt(fraction * (1 - fraction) / u.numel())
    assert abs(float(levels.mean()) - step) < error
    assert ((levels - step).abs() < 1).all()


def test_signs_are_treated_alike():
    u = torch.rand(1000)
    step = torch.randn(1000)
    assert torch.equal(round_step(step, u), -round_step(-step, u))


@given(st.floats(0, 1, width=32, exclude_max=True))
def test_no_step_is_no_change(u):
    assert round_step(torch.zeros(1), torch.tensor([u])).item() == 0


@given(st.floats(-300, 300, width=32), st.floats(0, 1, width=32, exclude_max=True))
def test_levels_are_whole_and_next_to_the_step(step, u):
    levels = round_step(torch.tensor([step]), torch.tensor([u])).item()
    assert levels == int(levels)
    assert abs(levels - torch.tensor(step, dtype=torch.float32).item()) <= 1


def test_arguments_are_left_alone():
    step, u = torch.randn(10), torch.rand(10)
    kept = step.clone(), u.clone()
    round_step(step, u)
    assert torch.equal(step, kept[0]) and torch.equal(u, kept[1])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("levels", [-1000.0, -3.0, -1.0, 0.0, 1.0, 3.0, 1000.0])
def test_codes_end_at_the_edges(bits, levels):
    grid = grid_of(bits)
    codes = torch.arange(grid.qmin, grid.qmax + 1, dtype=torch.int8)
    moved = apply_step(codes, torch.full((len(codes),), levels), grid)
    assert moved.dtype == torch.int8
    assert moved.tolist() == [int(max(grid.qmin, min(grid.qmax, q + levels))) for q in codes.tolist()]


def test_absolute_form_in_bfloat16_loses_what_delta_form_keeps():
    """Why the step is measured in grid units: the paper's code adds it to a weight first."""
    scale, code, step = 6.2e-4, 100, 0.05
    weight = torch.tensor(code * scale, dtype=torch.bfloat16)
    assert weight + torch.tensor(step * scale, dtype=torch.bfloat16) == weight
    u = torch.linspace(0, 1, 1001)[:-1]
    assert round_step(torch.full_like(u, step), u).mean() == pytest.approx(step, abs=1e-3)
