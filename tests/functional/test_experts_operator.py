"""`hf_lowbit::experts`: one call gives each expert's own product and gradients, and compiles without a break."""

import pytest
import torch

from hf_lowbit.functional.experts import experts_linear
from hf_lowbit.functional.linear import linear
from hf_lowbit.functional.rows import FIELD
from tests.functional.layers import make_layer, random


# an expert without rows between others, rows before the first expert's and behind the last one's
OFFSETS = torch.tensor([1, 3, 3, 4])
SCHEMES = pytest.mark.parametrize(
    ("bits", "group_size", "symmetric"),
    [("ternary", "tensor", True), (2, 4, False), (3, None, False), (4, 4, True), (8, "tensor", False)],
    ids=["ternary-tensor", "2-groups", "3-channel", "4-groups", "8-tensor"],
)


def stack(bits, group_size, symmetric, count=3):
    """Stored tensors of `count` experts, weight [E, 1, N, R], and the experts as layers."""
    layers = [make_layer(bits, group_size, symmetric, seed=seed) for seed in range(count)]
    zero_point = None if symmetric else torch.stack([layer.zero_point for layer in layers])
    weight = torch.stack([layer.weight for layer in layers]).unsqueeze(1)
    return (weight, torch.stack([layer.scale for layer in layers]), zero_point), layers


def by_expert(x, layers, bias, int8, offsets=OFFSETS):
    """One call an expert; zeros where no expert owns the row."""
    parts = [x.new_zeros(int(offsets[0]), 5)]
    for e, layer in enumerate(layers):
        own = x[offsets[e] : offsets[e + 1]]
        parts.append(
            linear(own, layer.weight, layer.scale, layer.zero_point, None if bias is None else bias[e],
                   layer.bits, 10, layer.block, int8)
        )  # fmt: skip
    return torch.cat([*parts, x.new_zeros(x.shape[0] - int(offsets[-1]), 5)])


@SCHEMES
@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("kernel", [None, "reference"])
def test_one_call_is_one_call_an_expert(bits, group_size, symmetric, int8, kernel, monkeypatch):
    stored, layers = stack(bits, group_size, symmetric)
    if kernel:
        monkeypatch.setenv("HF_LOWBIT_KERNEL", kernel)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x, bias = random(6, 10, dtype=dtype), random(3, 5)
        for b in (None, bias.to(dtype)):
            with torch.no_grad():
                got = experts_linear(x, OFFSETS, *stored, b, bits, 10, layers[0].block, int8)
                assert torch.equal(got, by_expert(x, layers, b, int8)) and got.dtype == dtype


@SCHEMES
def test_gradients_are_those_of_one_call_an_expert(bits, group_size, symmetric):
    (stored, layers), gradients = stack(bits, group_size, symmetric), []
    for batched in (True, False):
        x, bias = random(6, 10).requires_grad_(), random(3, 5, seed=2).requires_grad_()
        if batched:
            y = experts_linear(x, OFFSETS, *stored, bias, bits, 10, layers[0].block)
        else:
            y = by_expert(x, layers, bias, False)
        y.square().sum().backward()
        gradients.append((x.grad, bias.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    torch.testing.assert_close(gradients[0][1], gradients[1][1])


def test_second_derivatives():
    stored, layers = stack(4, 4, False)
    x = random(6, 10, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: experts_linear(x, OFFSETS, *stored, None, 4, 10, 4).square(), (x,))


@SCHEMES
def test_torch_finds_the_operators_correct(bits, group_size, symmetric):
    stored, layers = stack(bits, group_size, symmetric)
    scheme = FIELD[bits], 10, layers[0].block or 0
    x, bias = random(6, 10).requires_grad_(), random(3, 5).requires_grad_()
    torch.library.opcheck(torch.ops.hf_lowbit.experts.default, (x, OFFSETS, *stored, bias, *scheme, False))
    grad = random(6, 5)
    torch.library.opcheck(torch.ops.hf_lowbit.experts_backward.default, (grad, OFFSETS, *stored, *scheme))


def test_compile_has_no_graph_break():
    torch.compiler.reset()
    stored, _ = stack(4, 4, True)

    def product(x):
        return experts_linear(torch.tanh(x), OFFSETS, *stored, None, 4, 10, 4).square().sum()

    gradients = []
    for function in (product, torch.compile(product, fullgraph=True, backend="aot_eager")):
        x = random(6, 10).requires_grad_()
        function(x).backward()
        gradients.append(x.grad)
    torch.compiler.reset()
    assert torch.equal(*gradients)


def test_autocast_rounds_the_input():
    stored, layers = stack(4, 4, True)
    x = random(6, 10)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = experts_linear(x, OFFSETS, *stored, None, 4, 10, 4)
    with torch.no_grad():
        assert torch.equal(got, by_expert(x.bfloat16(), layers, None, False))


def test_no_rows():
    stored, _ = stack(4, 4, True)
    with torch.no_grad():
        assert experts_linear(random(0, 10), torch.zeros(4, dtype=torch.int64), *stored, None, 4, 10, 4).shape == (
            0,
            5,
        )


def test_another_width_is_refused():
    stored, _ = stack(4, 4, True)
    with torch.no_grad(), pytest.raises(ValueError, match="Expected 10 input features"):
        experts_linear(random(6, 11), OFFSETS, *stored, None, 4, 10, 4)
