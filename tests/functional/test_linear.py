"""The product with float activations: forward and gradient against a dense product in float64."""

import contextlib

import pytest
import torch

from hf_lowbit.functional.dispatch import kernel_names, use_kernel
from tests.functional.layers import make_layer, random


SCHEMES = [
    pytest.param("ternary", "tensor", True, id="ternary-tensor"),
    pytest.param("ternary", 4, True, id="ternary-groups"),
    pytest.param(2, 4, False, id="2-bits-groups-zero-points"),
    pytest.param(3, None, True, id="3-bits-channel"),
    pytest.param(3, 4, False, id="3-bits-groups-zero-points"),
    pytest.param(4, 4, True, id="4-bits-groups"),
    pytest.param(4, None, False, id="4-bits-channel-zero-points"),
    pytest.param(8, 4, False, id="8-bits-groups-zero-points"),
    pytest.param(8, "tensor", True, id="8-bits-tensor"),
]
KERNELS = [pytest.param("reference", id="reference"), pytest.param(None, id="chosen")]
# one rounding of each weight and one of the result, relative to the sum of absolute products; float32 sums besides
ROUNDOFF = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
DTYPES = pytest.mark.parametrize("dtype", ROUNDOFF, ids=lambda dtype: str(dtype).removeprefix("torch."))


def forced(kernel):
    return use_kernel(kernel) if kernel else contextlib.nullcontext()


def close(actual, expected, size, dtype):
    """Is every number within the dtype's roundoff of the terms it was summed from?"""
    return bool(((actual.double() - expected).abs() <= ROUNDOFF[dtype] * size + torch.finfo(dtype).tiny).all())


@DTYPES
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("bits", "group_size", "symmetric"), SCHEMES)
def test_forward_is_the_dense_product(bits, group_size, symmetric, kernel, dtype):
    layer = make_layer(bits, group_size, symmetric)
    x, bias = random(7, 10, dtype=dtype), random(5, seed=2, dtype=dtype)
    with torch.no_grad(), forced(kernel):
        y = layer(x, bias)
    dense = layer.dense(dtype)
    expected = x.double() @ dense.t() + bias.double()
    size = x.double().abs() @ dense.abs().t() + bias.double().abs()
    assert y.dtype == dtype and y.shape == (7, 5)
    assert close(y, expected, size, dtype)


@DTYPES
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("bits", "group_size", "symmetric"), SCHEMES)
def test_gradients_are_those_of_the_dense_product(bits, group_size, symmetric, with_bias, dtype):
    layer = make_layer(bits, group_size, symmetric)
    x = random(7, 10, dtype=dtype).requires_grad_()
    bias = random(5, seed=2, dtype=dtype).requires_grad_() if with_bias else None
    upstream = random(7, 5, seed=3, dtype=dtype)
    y = layer(x, bias)
    y.backward(upstream)

    dense = layer.dense(dtype)
    x64 = x.detach().double().requires_grad_()
    bias64 = bias.detach().double().requires_grad_() if with_bias else None
    torch.nn.functional.linear(x64, dense, bias64).backward(upstream.double())
    size = upstream.double().abs() @ dense.abs()
    assert x.grad.dtype == dtype and close(x.grad, x64.grad, size, dtype)
    if with_bias:
        assert bias.grad.dtype == dtype
        assert close(bias.grad, bias64.grad, upstream.double().abs().sum(0), dtype)


def test_only_what_is_asked_for_gets_a_gradient():
    layer, x, bias = make_layer(), random(2, 10), random(5).requires_grad_()
    layer(x, bias).sum().backward()
    assert x.grad is None and bias.grad.tolist() == [2.0] * 5
    assert layer.scale.grad is None and not layer(x).requires_grad


def test_the_gradient_reaches_through_two_layers():
    first, second = make_layer(out_features=6, in_features=10), make_layer(8, 4, False, 3, 6, seed=5)
    x = random(4, 10, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: second(torch.tanh(first(x))), x)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(10,), (1, 10), (2, 3, 10), (2, 1, 3, 10), (0, 10), (2, 0, 10)], ids=str)
def test_any_leading_shape(shape, kernel):
    layer, x = make_layer(4, 4), random(*shape)
    with forced(kernel):
        with torch.no_grad():
            y = layer(x)
        recorded = layer(x.clone().requires_grad_())
    assert y.shape == recorded.shape == (*shape[:-1], 5)
    assert close(y, x.double() @ layer.dense(torch.float32).t(), 10 * torch.ones(()), torch.float32)
    assert torch.equal(y, recorded)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("out_features", [1, 2, 3, 15, 16, 17, 33])
def test_any_number_of_outputs(out_features, kernel):
    layer, x = make_layer(4, 4, out_features=out_features), random(3, 10)
    with torch.no_grad(), forced(kernel):
        y = layer(x)
    assert close(y, x.double() @ layer.dense(torch.float32).t(), 10 * torch.ones(()), torch.float32)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(lambda x: x[:, -1:, :], id="last-token"),
        pytest.param(lambda x: x[:, :, ::2], id="every-other-column"),
        pytest.param(lambda x: x[..., :10].transpose(0, 1), id="transposed"),
        pytest.param(lambda x: x[:1, :1, :10].expand(2, 3, 10), id="expanded"),
    ],
)
def test_any_strides(cut, kernel):
    layer, x = make_layer(4, 4), random(2, 3, 20)
    x = cut(x)[..., :10]
    with torch.no_grad(), forced(kernel):
        y, same = layer(x), layer(x.contiguous())
    assert close(y, same.double(), 10 * torch.ones(()), torch.float32)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@DTYPES
def test_a_bias_of_another_dtype_is_added(dtype, bias_dtype, kernel):
    layer, x, bias = make_layer(4, 4), random(3, 10, dtype=dtype), random(5, dtype=bias_dtype)
    with torch.no_grad(), forced(kernel):
        y = layer(x, bias)
    dense = layer.dense(dtype)
    size = x.double().abs() @ dense.abs().t() + bias.double().abs()
    assert y.dtype == dtype
    assert close(y, x.double() @ dense.t() + bias.double(), size, dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_in_its_row(bad, kernel):
    layer, x = make_layer(4, 4), random(4, 10)
    with torch.no_grad(), forced(kernel):
        clean = layer(x)
        x[2, 3] = bad
        y = layer(x)
    assert not torch.isfinite(y[2]).any()
    rest = [0, 1, 3]
    assert close(y[rest], clean[rest].double(), 10 * torch.ones(()), torch.float32)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
def test_a_row_of_zeros_gives_the_bias(int8, kernel):
    layer, bias = make_layer(4, 4, False), random(5)
    with torch.no_grad(), forced(kernel):
        assert torch.equal(layer(torch.zeros(2, 10), bias, int8), bias.expand(2, 5))
        assert not layer(torch.zeros(2, 10), None, int8).any()


@pytest.mark.parametrize("width", [1, 9, 11, 20])
@pytest.mark.parametrize("record", [True, False], ids=["grad", "no-grad"])
def test_inputs_of_another_width_never_reach_a_kernel(width, record):
    layer = make_layer()
    for name in (None, *kernel_names()):
        with torch.set_grad_enabled(record), forced(name):
            with pytest.raises((ValueError, RuntimeError), match=f"Expected 10 input features. Got {width}."):
                layer(random(3, width))


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
def test_nothing_that_goes_in_is_changed(int8):
    layer, x, bias = make_layer(3, 4, False), random(3, 10), random(5)
    tensors = [x, bias, layer.weight, layer.scale, layer.zero_point]
    before = [t.clone() for t in tensors]
    with torch.no_grad():
        layer(x, bias, int8)
    layer(x.requires_grad_(), bias, int8).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
