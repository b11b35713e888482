"""The searched clip: never worse than covering the whole range, and what it is for at two and three bits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_lowbit.functional.grid import dequantize, grid_of
from hf_lowbit.functional.rounding import round_to_nearest


# both searched and covering step are rounded to bfloat16 (unit roundoff 2^-8) after they were rated, and each moves
# the dequantized group by that share of its length: at most the group's own for the searched one, twice for the other
BF16_SLACK = 2.0**-8 * 3
# candidates are rated by a float32 number near the weight's squared length, which can't tell apart squared errors that
# differ by less than a few of its last bits
RATING_SLACK = 4 * 2.0**-23
# float32 arithmetic on single numbers
FLOAT32_SLACK = 1e-5


def error(weight, bits, group_size, symmetric, search):
    """Length of what rounding loses, in units of the weight's; squares weighted by magnitude, as in the search."""
    q = round_to_nearest(weight, grid_of(bits), group_size, symmetric, search)
    block = group_size if isinstance(group_size, int) else None
    w = weight.double()
    lost = dequantize(q.codes, q.scale, q.zero_point, block).double() - w
    return float(((lost**2 * w.abs()).sum() / (w.abs() ** 3).sum()).sqrt())


@st.composite
def awkward_weights(draw):
    """One row: Gaussian, long-tailed, one-sided, with outliers, or nearly constant."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    x = torch.randn(1, draw(st.integers(1, 40)), generator=generator)
    shape = draw(st.sampled_from(["gaussian", "cubed", "one-sided", "outlier", "constant", "sparse"]))
    if shape == "cubed":
        x = x**3
    elif shape == "one-sided":
        x = -x.abs() - 0.5
    elif shape == "outlier":
        x[0, 0] *= 50
    elif shape == "constant":
        x = 1 + 0.01 * x
    elif shape == "sparse":
        x[:, 1::2] = 0
    return x


@given(awkward_weights(), st.sampled_from([2, 3, 4, 8]), st.booleans(), st.sampled_from([None, "tensor"]))
def test_search_never_loses_more_than_covering(weight, bits, symmetric, group_size):
    searched = error(weight, bits, group_size, symmetric, search=True)
    assert searched**2 <= error(weight, bits, group_size, symmetric, search=False) ** 2 + RATING_SLACK


@given(awkward_weights(), st.sampled_from([2, 3, 4]), st.booleans())
def test_search_never_loses_more_than_covering_in_groups(weight, bits, symmetric):
    searched = error(weight, bits, 64, symmetric, search=True)
    assert searched <= error(weight, bits, 64, symmetric, search=False) + BF16_SLACK


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero-points"])
def test_eight_bits_lose_nothing_by_the_search(symmetric):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for group_size in (64, None, "tensor"):
        searched = error(weight, 8, group_size, symmetric, search=True)
        assert searched < error(weight, 8, group_size, symmetric, search=False)


@pytest.mark.parametrize(
    ("bits", "symmetric", "group_size", "ratio"),
    [
        # largest share of the covering step's weighted squared error that may remain on Gaussian weights
        pytest.param(2, True, 64, 0.35, id="2-bits-groups"),
        pytest.param(2, True, None, 0.3, id="2-bits-channel"),
        pytest.param(2, False, 64, 0.75, id="2-bits-zero-points-groups"),
        pytest.param(2, False, None, 0.62, id="2-bits-zero-points-channel"),
        pytest.param(3, True, 64, 0.75, id="3-bits-groups"),
        pytest.param(3, True, None, 0.65, id="3-bits-channel"),
        pytest.param(3, False, 64, 0.92, id="3-bits-zero-points-groups"),
        pytest.param(3, False, None, 0.87, id="3-bits-zero-points-channel"),
    ],
)
def test_search_pays_at_low_bits(bits, symmetric, group_size, ratio):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    searched = error(weight, bits, group_size, symmetric, search=True)
    assert searched**2 <= ratio * error(weight, bits, group_size, symmetric, search=False) ** 2


# the search may miss the best of a fine sweep by this share of the squared error: its steps are a few percent apart
SWEEP_SLACK = 0.03


# at 8 bits the best of 400 steps owes more to luck in the rounding of single weights
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_search_finds_what_a_fine_sweep_finds(bits):
    """Symmetric, per channel: every step of a fine sweep, in numpy, each with its nearest codes and best scale."""
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(1))
    grid = grid_of(bits)
    w = weight.double().numpy()
    m = np.abs(w)
    best = np.full(8, np.inf)
    for fraction in np.linspace(0.05, 1.1, 400):
        step = fraction * np.abs(w).max(axis=1, keepdims=True) / grid.qmax
        codes = np.clip(np.rint(w / step), grid.qmin, grid.qmax)
        scale = (m * w * codes).sum(axis=1, keepdims=True) / (m * codes**2).sum(axis=1, keepdims=True)
        codes = np.clip(np.rint(w / scale), grid.qmin, grid.qmax)
        best = np.minimum(best, (m * (w - scale * codes) ** 2).sum(axis=1))
    q = round_to_nearest(weight, grid, None, symmetric=True)
    found = (m * (w - dequantize(q.codes, q.scale).double().numpy()) ** 2).sum(axis=1)
    assert found.sum() <= (1 + SWEEP_SLACK) * best.sum()


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_serve_one_sided_groups(bits, sign):
    """All codes lie on the side that is used; a grid around zero has about half of them there (2 bits: -2 and -1)."""
    weight = sign * torch.rand(16, 64, generator=torch.Generator().manual_seed(0))
    assert error(weight, bits, None, False, True) < 0.75 * error(weight, bits, None, True, True)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_covering_step_loses_a_step_at_most(bits):
    """Half a step by rounding, half by the zero point, which is an integer too."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    q = round_to_nearest(weight, grid_of(bits), None, symmetric=False, search=False)
    lost = (dequantize(q.codes, q.scale, q.zero_point) - weight).abs()
    assert bool((lost <= q.scale * (1 + FLOAT32_SLACK)).all())
