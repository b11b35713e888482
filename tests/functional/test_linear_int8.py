"""int8 activations: exactly the integers of the definition, computed again in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.functional.grid import BITS
from hf_lowbit.functional.linear import quantize_activations
from tests.functional.layers import make_layer, random


# x * (127 / max|x|) is formed by three float32 roundings, so a tie may fall to either side
TIE = 127 * 2.0**-22


def product_in_numpy(layer, x, bias):
    """t * sum_g s_g * (integer sum of group g), the integers exact, the rest float32 in this order."""
    a, t = (tensor.numpy() for tensor in quantize_activations(x))
    a, steps, scale = a.astype(np.int64), layer.steps().astype(np.int64), layer.scale.float().numpy()
    y = np.zeros((x.shape[0], steps.shape[0]), np.float32)
    size = layer.block or x.shape[1]
    for g, start in enumerate(range(0, x.shape[1], size)):
        sums = a[:, start : start + size] @ steps[:, start : start + size].T
        y += sums.astype(np.float32) * scale[:, g]
    y *= t
    return torch.from_numpy(y if bias is None else y + bias.float().numpy()).to(x.dtype)


@given(
    st.sampled_from(BITS),
    st.sampled_from([None, "tensor", 3, 4, 64]),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 1000),
)
def test_reference_is_the_integer_computation(bits, group_size, symmetric, rows, width, with_bias, dtype, seed):
    layer = make_layer(bits, group_size, symmetric or bits == "ternary", 3, width, seed)
    x = random(rows, width, seed=seed + 1).to(dtype)
    bias = random(3, seed=seed + 2).to(dtype) if with_bias else None
    with torch.no_grad(), use_kernel("reference"):
        assert torch.equal(layer(x, bias, int8=True), product_in_numpy(layer, x, bias))


def test_large_sums_are_exact():
    """4096 products of 127 and -128 exceed what float32 holds exactly."""
    layer = make_layer(8, None, True, 3, 4097)
    layer = layer._replace(weight=torch.full_like(layer.weight, -128), codes=torch.full_like(layer.codes, -128))
    x = torch.full((1, 4097), 0.5)
    with torch.no_grad(), use_kernel("reference"):
        assert torch.equal(layer(x, None, int8=True), product_in_numpy(layer, x, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_tokens_are_rounded_one_by_one(dtype):
    x = random(6, 9, dtype=dtype) * torch.logspace(-3, 3, 6, dtype=dtype)[:, None]
    codes, scale = quantize_activations(x)
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (6, 1)
    assert torch.equal(scale, x.float().abs().amax(dim=1, keepdim=True) / 127)
    assert codes.abs().amax(dim=1).tolist() == [127] * 6
    largest = x.float().double().abs().amax(dim=1, keepdim=True)
    assert float((codes - x.float().double() * 127 / largest).abs().max()) <= 0.5 + TIE


def test_edges_of_a_token():
    nothing, empty = quantize_activations(torch.zeros(2, 3)), quantize_activations(torch.zeros(2, 0))
    assert not nothing[0].any() and not nothing[1].any()
    assert empty[0].shape == (2, 0) and empty[1].tolist() == [[0.0], [0.0]]
    bad = quantize_activations(torch.tensor([[1, torch.nan], [1, torch.inf], [-torch.inf, 1], [1, 2]]))
    assert bad[1][:3].isnan().all() and float(bad[1][3]) == pytest.approx(2 / 127)


@pytest.mark.parametrize("kernel", ["reference", None])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("group_size", [4, None])
def test_a_row_that_holds_no_number_gives_none(group_size, bad, kernel):
    layer, x, bias = make_layer("ternary", group_size), random(4, 10), random(5)
    with torch.no_grad():
        clean = layer(x, bias, int8=True)
        x[2, 3] = bad
        y = layer(x, bias, int8=True)
    assert y[2].isnan().all()
    assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("size", [1e-45, 1e-38, 3e38])
def test_the_ends_of_float32_give_finite_numbers(size):
    with torch.no_grad(), use_kernel("reference"):
        y = make_layer("ternary", None)(torch.tensor([[1.0, -1, 0, 0.5, 0, 0, 0, 0, 0, 0]]) * size, None, int8=True)
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("group_size", [4, None, "tensor"])
def test_the_gradient_passes_straight_through_the_rounding(group_size):
    layer = make_layer("ternary", group_size)
    x, upstream = random(3, 10).requires_grad_(), random(3, 5, seed=4)
    layer(x, None, int8=True).backward(upstream)
    assert torch.equal(x.grad, upstream @ layer.dense(torch.float32).float())
