"""Every processor tier computes the reference's product: integers exactly, floats within stated bounds."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_lowbit.functional.dispatch import kernel_names
from hf_lowbit.functional.linear import reference_linear
from hf_lowbit.kernels.cpu import TIERS
from tests.kernels.weights import ROWS, SIZES, expected_and_size, make_weight, problem_for, run, schemes


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# units in the last place of the terms: float32 sums of up to 8192 of them, one after the other and in any order
FLOAT_SUM = 32.0
# bfloat16 tiers round W once, as the reference does; each term is off by half a unit, at random
ROUNDED_W = 1.0

several = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@several
@given(data=st.data())
def test_int8_sums_are_exact(tier, data):
    bits, group, asymmetric = data.draw(schemes())
    rows, out_features, in_features = data.draw(ROWS), data.draw(SIZES), data.draw(SIZES)
    weight = make_weight(
        bits, group, asymmetric, out_features, in_features, data.draw(st.integers(0, 99)), unit_scale=True
    )
    x = torch.randint(-127, 128, (rows, in_features)).to(torch.float32)
    # the largest magnitude is 127 in each row, so t = 1 and codes are x itself
    x[:, 0] = 127.0
    problem = problem_for(x, weight, bits, group, in_features, True)
    expected, _ = expected_and_size(x, weight, bits, group, None, False)
    y = run(tier, x, weight, None, bits, group, True)
    assert torch.equal(y.to(torch.float64), expected)
    assert torch.equal(y, reference_linear(x, *weight, None, problem))


@several
@given(data=st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_activations(tier, dtype, data):
    bits, group, asymmetric = data.draw(schemes())
    rows, out_features, in_features = data.draw(ROWS), data.draw(SIZES), data.draw(SIZES)
    weight = make_weight(bits, group, asymmetric, out_features, in_features, data.draw(st.integers(0, 99)))
    x = torch.randn(rows, in_features).to(DTYPES[dtype])
    bias = torch.randn(out_features).to(DTYPES[dtype]) if data.draw(st.booleans()) else None
    y = run(tier, x, weight, bias, bits, group, True)
    if not isinstance(group, int):
        # one scale a row: the same operations in the same order as the reference
        problem = problem_for(x, weight, bits, group, in_features, True)
        assert torch.equal(y, reference_linear(x, *weight, bias, problem))
    expected, size = expected_and_size(x, weight, bits, group, bias, True)
    bound = torch.finfo(DTYPES[dtype]).eps * expected.abs() + FLOAT_SUM * torch.finfo(torch.float32).eps * (size + 4)
    assert ((y.to(torch.float64) - expected).abs() <= bound).all()


@several
@given(data=st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_float_activations(tier, dtype, data):
    bits, group, asymmetric = data.draw(schemes())
    rows, out_features, in_features = data.draw(ROWS), data.draw(SIZES), data.draw(SIZES)
    weight = make_weight(bits, group, asymmetric, out_features, in_features, data.draw(st.integers(0, 99)))
    x = torch.randn(rows, in_features).to(DTYPES[dtype])
    bias = torch.randn(out_features).to(DTYPES[dtype]) if data.draw(st.booleans()) else None
    y = run(tier, x, weight, bias, bits, group, False)
    expected, size = expected_and_size(x, weight, bits, group, bias, False)
    eps = torch.finfo(DTYPES[dtype]).eps
    bound = eps * expected.abs() + FLOAT_SUM * torch.finfo(torch.float32).eps * (size + 4)
    if dtype == "bf16":
        bound += ROUNDED_W * eps * size
    assert ((y.to(torch.float64) - expected).abs() <= bound).all()


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
@pytest.mark.parametrize(("rows", "in_features"), [(1, 8192), (12, 8192), (300, 4160)], ids=["few", "some", "many"])
def test_long_rows(tier, rows, in_features, int8):
    # panels are cut into chunks, rows of x into blocks
    weight = make_weight(4, 64, True, 40, in_features)
    x = torch.randn(rows, in_features)
    y = run(tier, x, weight, None, 4, 64, int8)
    expected, size = expected_and_size(x, weight, 4, 64, None, int8)
    assert ((y.to(torch.float64) - expected).abs() <= FLOAT_SUM * torch.finfo(torch.float32).eps * size).all()


def test_kernels_are_registered():
    assert [name for name in kernel_names() if name in TIERS] == [
        "cpu-amx",
        "cpu-avx512vnni",
        "cpu-avxvnni",
        "cpu-avx2",
        "cpu-portable",
    ]
