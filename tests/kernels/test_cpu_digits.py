"""One row of floats is multiplied in fixed point: exact enough, and never where x has no fixed point."""

import pytest
import torch

from tests.kernels.weights import expected_and_size, make_weight, run


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("bits", "group"), [("ternary", "tensor"), (2, 64), (3, 64), (4, 64), (4, None), (8, None), (8, 64)]
)
def test_entries_beside_an_outlier(tier, dtype, bits, group):
    # language models have activations a thousand times the others
    weight = make_weight(bits, group, bits != "ternary", 40, 576)
    x = torch.randn(1, 576)
    x[0, 5] = 3000.0
    x = x.to(dtype)
    y = run(tier, x, weight, None, bits, group, False)
    expected, size = expected_and_size(x, weight, bits, group, None, False)
    assert ((y.to(torch.float64) - expected).abs() <= torch.finfo(dtype).eps * expected.abs() + 4e-6 * size).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite(tier, dtype, value):
    weight = make_weight(4, 64, False, 40, 128)
    x = torch.randn(1, 128).to(dtype)
    x[0, 100] = value
    y = run(tier, x, weight, None, 4, 64, False)
    assert not y.isfinite().any() if value != value else not y.isfinite().all()


@pytest.mark.parametrize("magnitude", [0.0, 1e-42, 1e-30, 1e-20, 1e30])
def test_magnitudes(tier, magnitude):
    weight = make_weight(4, 64, True, 40, 128)
    x = torch.randn(1, 128) * magnitude
    y = run(tier, x, weight, None, 4, 64, False)
    expected, size = expected_and_size(x, weight, 4, 64, None, False)
    assert y.isfinite().all()
    assert ((y.to(torch.float64) - expected).abs() <= 4e-6 * size + 1e-44).all()


def test_small_entries_beside_a_large_one_that_meets_zeros(tier):
    # float32 keeps 2^-32 of the largest entry
    packed, scale, _ = make_weight(8, None, False, 8, 64)
    packed[:, 0] = 0
    x = torch.full((1, 64), 1e-3)
    x[0, 0] = 1e4
    expected, _ = expected_and_size(x, (packed, scale, None), 8, None, None, False)
    y = run(tier, x, (packed, scale, None), None, 8, None, False)
    step = 1e4 * 2.0**-32
    assert (
        (y.to(torch.float64) - expected).abs() <= 8 * step * 128 * float(scale.max()) + 4e-6 * expected.abs()
    ).all()
