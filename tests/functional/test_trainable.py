"""The product with weights in training: values and gradients against plain autograd on a dense weight."""

import pytest
import torch
import torch.nn.functional as F

from hf_lowbit.functional.coarse import ternary
from hf_lowbit.functional.grid import dequantize, grid_of
from hf_lowbit.functional.linear import quantize_activations
from hf_lowbit.functional.packing import pack
from hf_lowbit.functional.rounding import round_to_nearest
from hf_lowbit.functional.trainable import Form, trainable_linear


# float32 sums in another order
TOLERANCE = 1e-4
CASES = [(bits, coarse, group) for bits in ("ternary", 2, 3, 4, 8) for coarse in (False, True) for group in (None, 16)
         if not coarse or bits in (3, 4, 8)]  # fmt: skip


def make(bits, group_size, coarse, int8=False, transposed=False):
    torch.manual_seed(0)
    q = round_to_nearest(torch.randn(24, 40), grid_of(bits), group_size, symmetric=True)
    form = Form(bits, 40, group_size, coarse, int8, transposed)
    return q.codes, q.scale, pack(q.codes, grid_of(bits)), form


@pytest.mark.parametrize(("bits", "coarse", "group_size"), CASES)
def test_values_and_gradients_are_those_of_the_dense_weight(bits, coarse, group_size):
    codes, scale, stored, form = make(bits, group_size, coarse)
    used = ternary(codes, scale, group_size)[:2] if coarse else (codes, scale)
    dense = dequantize(used[0], used[1], None, group_size).requires_grad_()
    x = torch.randn(2, 5, 40)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    bias, other = torch.randn(24, requires_grad=True), None
    other = bias.detach().clone().requires_grad_()
    slot = torch.zeros(24, 40, requires_grad=True)
    y = trainable_linear(ours, slot, stored, scale, None, bias, form)
    expected = F.linear(theirs, dense, other)
    assert torch.allclose(y, expected, atol=TOLERANCE)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    expected.backward(upstream)
    for found, wanted in [(ours.grad, theirs.grad), (slot.grad, dense.grad), (bias.grad, other.grad)]:
        assert torch.allclose(found, wanted, atol=TOLERANCE * wanted.abs().max())


@pytest.mark.parametrize("coarse", [False, True], ids=["codes", "ternary"])
@pytest.mark.parametrize("group_size", [None, 16, "tensor"], ids=str)
def test_scale_gradient_is_that_of_its_logarithm(group_size, coarse):
    """By central differences in float64 of the loss along log s."""
    torch.manual_seed(1)
    q = round_to_nearest(torch.randn(24, 40), grid_of(8), group_size, symmetric=True)
    block = group_size if isinstance(group_size, int) else None
    scale = q.scale.float().requires_grad_()
    form = Form(8, 40, block, coarse, False, False)
    x, upstream = torch.randn(6, 40), torch.randn(6, 24)
    slot = torch.zeros(24, 40, requires_grad=True)
    (trainable_linear(x, slot, q.codes, scale, None, None, form) * upstream).sum().backward()
    codes, step = q.codes, 1e-4

    def loss(factor, index):
        moved = scale.detach().double().clone()
        moved.view(-1)[index] *= factor
        t = ternary(codes, scale.detach(), block) if coarse else None
        values = t.codes.double() if coarse else codes.double()
        if coarse:
            moved = moved * t.mu.double()
        if block:
            dense = values * moved.repeat_interleave(block, dim=1)[:, :40]
        else:
            dense = values * moved
        return float((F.linear(x.double(), dense) * upstream.double()).sum())

    for index in range(0, scale.numel(), 7):
        numeric = (loss(1 + step, index) - loss(1 - step, index)) / (2 * step)
        assert float(scale.grad.view(-1)[index]) == pytest.approx(numeric, rel=1e-3, abs=1e-3)


def test_int8_activations_pass_gradients_straight_through():
    codes, scale, stored, form = make("ternary", None, False, int8=True)
    x = torch.randn(6, 40, requires_grad=True)
    slot = torch.zeros(24, 40, requires_grad=True)
    y = trainable_linear(x, slot, stored, scale, None, None, form)
    a, t = quantize_activations(x.detach())
    rounded = a.float() * t
    dense = dequantize(codes, scale)
    assert torch.allclose(y, F.linear(rounded, dense), atol=TOLERANCE)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    assert torch.allclose(x.grad, upstream @ dense, atol=TOLERANCE)
    assert torch.allclose(slot.grad, upstream.t() @ rounded, atol=TOLERANCE * 10)


def test_transposed_gradient():
    _, scale, stored, form = make(8, None, False, transposed=True)
    slot = torch.zeros(40, 24, requires_grad=True)
    x = torch.randn(6, 40)
    trainable_linear(x, slot, stored, scale, None, None, form).sum().backward()
    assert torch.allclose(slot.grad, x.sum(0).unsqueeze(1).expand(40, 24), atol=TOLERANCE)


@pytest.mark.parametrize("slot_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_computes_in_bfloat16_and_gradients_keep_the_slots_dtype(slot_dtype):
    _, scale, stored, form = make(8, None, True)
    slot = torch.zeros(24, 40, dtype=slot_dtype, requires_grad=True)
    x = torch.randn(6, 40, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = trainable_linear(x, slot, stored, scale, None, torch.randn(24), form)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert slot.grad.dtype == slot_dtype and x.grad.dtype == torch.float32
