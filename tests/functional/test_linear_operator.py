"""`hf_lowbit::linear` as an operator: torch's own checks, torch.compile, autocast, meta tensors."""

import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.functional.layers import make_layer, random


FIELD = {"ternary": 1, 2: 2, 3: 3, 4: 4, 8: 8}


@pytest.mark.parametrize(
    ("bits", "group_size"),
    [("ternary", "tensor"), (2, 4), (3, None), (4, 4), (8, "tensor")],
    ids=["ternary-tensor", "2-groups", "3-channel", "4-groups", "8-tensor"],
)
def test_torch_finds_the_operator_correct(bits, group_size):
    """Schema, registrations, fake tensors and dynamic shapes, with every optional argument present and absent."""
    for symmetric, int8, recorded in itertools.product([True, False], repeat=3):
        layer = make_layer(bits, group_size, symmetric or bits == "ternary")
        x = random(3, 10).requires_grad_(recorded)
        bias = random(5).requires_grad_() if recorded else None
        arguments = (x, layer.weight, layer.scale, layer.zero_point, bias, FIELD[bits], 10, layer.block or 0, int8)
        torch.library.opcheck(torch.ops.hf_lowbit.linear.default, arguments)


@pytest.fixture
def compiled():
    """torch.compile that allows no graph break, forgotten afterwards."""
    torch.compiler.reset()
    yield lambda function, **options: torch.compile(function, fullgraph=True, backend="aot_eager", **options)
    torch.compiler.reset()


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("bits", [2, 4, "ternary"], ids=str)
def test_compile_without_gradient(compiled, bits, int8):
    layer, x, bias = make_layer(bits, 4, bits != 2), random(2, 3, 10), random(5)

    def product(x):
        return torch.relu(layer(x, bias, int8))

    with torch.no_grad():
        assert torch.equal(compiled(product)(x), product(x))


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
def test_compile_with_gradient(compiled, int8):
    layer, gradients = make_layer(3, 4, False), []

    def product(x, bias):
        return layer(torch.tanh(x), bias, int8).square()

    for function in (product, compiled(product)):
        x, bias = random(3, 10).requires_grad_(), random(5).requires_grad_()
        function(x, bias).sum().backward()
        gradients.append((x.grad, bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_compile_with_any_number_of_rows(compiled):
    layer = make_layer(4, 4)
    product = compiled(lambda x: layer(x), dynamic=True)
    with torch.no_grad():
        for rows in (2, 3, 17):
            assert torch.equal(product(random(rows, 10)), layer(random(rows, 10)))


def test_compile_under_autocast(compiled):
    layer, x = make_layer(4, 4), random(3, 10)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        result = compiled(lambda x: layer(x))(x)
        assert result.dtype == torch.bfloat16 and torch.equal(result, layer(x))


@pytest.mark.parametrize("recorded", [True, False], ids=["grad", "no-grad"])
@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_rounds_the_input_and_nothing_else(dtype, int8, recorded):
    layer, x, bias = make_layer(4, 4, False), random(3, 10), random(5)
    with torch.set_grad_enabled(recorded):
        with torch.autocast("cpu", dtype):
            cast = layer(x.clone().requires_grad_(recorded), bias, int8)
        plain = layer(x.to(dtype), bias, int8)
    assert cast.dtype == dtype
    assert torch.equal(cast, plain)


def test_autocast_leaves_float64_alone():
    layer, x = make_layer(), random(3, 10, dtype=torch.float64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.nn.functional.linear(x, x).dtype == torch.float64


def test_autocast_gives_float32_gradients_to_float32_inputs():
    layer, x, bias = make_layer(), random(3, 10).requires_grad_(), random(5).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, bias)
    y.float().sum().backward()
    assert x.grad.dtype == bias.grad.dtype == torch.float32


@pytest.mark.parametrize("recorded", [True, False], ids=["grad", "no-grad"])
def test_meta_tensors_have_the_shape_and_dtype_of_the_result(recorded):
    layer = make_layer(4, 4, False)
    layer = layer._replace(**{n: getattr(layer, n).to("meta") for n in ("weight", "scale", "zero_point")})
    x = torch.empty(2, 3, 10, dtype=torch.bfloat16, device="meta", requires_grad=recorded)
    with torch.set_grad_enabled(recorded):
        y = layer(x)
    assert (y.device.type, y.shape, y.dtype) == ("meta", (2, 3, 5), torch.bfloat16)


def test_checkpointing_recomputes_the_same_gradient():
    layer, gradients = make_layer(8, 4), []
    for use in (False, True):
        x = random(3, 10).requires_grad_()
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if use else layer(x)
        y.square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_inference_mode():
    layer, x = make_layer(4, 4), random(3, 10)
    with torch.inference_mode():
        inside = layer(x)
    with torch.no_grad():
        assert torch.equal(inside.clone(), layer(x))


def test_whoever_watches_the_operators_sees_the_product():
    """Without gradients a call skips the operator, but not where something records what runs."""
    layer, x = make_layer(4, 4), random(3, 10)
    with torch.no_grad():
        expected = layer(x)
        traced = torch.jit.trace(lambda z: layer(z), x)
        assert torch.equal(traced(x), expected)
        graph = make_fx(lambda z: layer(z))(x)
        assert torch.equal(graph(x), expected)
        assert torch.ops.hf_lowbit.linear.default in [node.target for node in graph.graph.nodes]
        torch.testing.assert_close(torch.func.vmap(layer)(x.unsqueeze(1)).squeeze(1), expected)
