"""Inputs that break kernels: empty, strided, not finite, unaligned, of an unusual dtype or size."""

import pytest
import torch

from hf_lowbit.functional.dispatch import choose, use_kernel
from hf_lowbit.functional.linear import linear, reference_linear
from tests.kernels.weights import make_weight, problem_for, run


SCHEMES = {"ternary": ("ternary", "tensor"), "int4": (4, 64), "int3": (3, 32), "int8": (8, None)}
ACTIVATIONS = pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCHEMES)


@EVERY_SCHEME
@ACTIVATIONS
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17])
def test_rows(tier, scheme, int8, rows):
    bits, group = SCHEMES[scheme]
    weight = make_weight(bits, group, False, 33, 200)
    x, bias = torch.randn(rows, 200), torch.randn(33)
    y = run(tier, x, weight, bias, bits, group, int8)
    expected = reference_linear(x, *weight, bias, problem_for(x, weight, bits, group, 200, int8))
    assert y.shape == (rows, 33) and y.dtype == x.dtype
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)


@EVERY_SCHEME
@ACTIVATIONS
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_strides(tier, scheme, int8, rows):
    bits, group = SCHEMES[scheme]
    weight = make_weight(bits, group, False, 24, 96)
    base = torch.randn(rows, 96)
    want = run(tier, base, weight, None, bits, group, int8)
    wide = torch.randn(rows, 4, 200)
    wide[:, 1, 50:146] = base
    views = {
        "columns of a matrix": base.t().contiguous().t(),
        "slice of a wider row": wide[:, 1, 50:146],
        "every second": base.repeat_interleave(2, dim=1)[:, ::2],
        # the last position of a sequence, as a language model's head sees it
        "size-1 dimension": wide[:, 1:2, 50:146],
    }
    for name, x in views.items():
        assert torch.equal(run(tier, x, weight, None, bits, group, int8).reshape(rows, 24), want), name
    one = base[:1].expand(rows, 96)
    assert torch.equal(run(tier, one, weight, None, bits, group, int8), want[:1].expand(rows, 24))


@EVERY_SCHEME
@ACTIVATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("rows", [2, 20])
def test_not_finite_stays_in_its_row(tier, scheme, int8, dtype, rows):
    bits, group = SCHEMES[scheme]
    weight = make_weight(bits, group, False, 17, 160)
    x = torch.randn(rows, 160).to(dtype)
    clean = run(tier, x, weight, None, bits, group, int8)
    for value in (float("nan"), float("inf"), float("-inf")):
        dirty = x.clone()
        dirty[1, 77] = value
        y = run(tier, dirty, weight, None, bits, group, int8)
        assert torch.equal(y[0], clean[0])
        # a float product meets codes that are zero: infinity times zero is NaN, times others infinite
        assert (y[1].isnan() if int8 else ~y[1].isfinite()).all()


@EVERY_SCHEME
@ACTIVATIONS
@pytest.mark.parametrize("rows", [1, 18])
def test_zero_and_tiny_rows(tier, scheme, int8, rows):
    bits, group = SCHEMES[scheme]
    weight, bias = make_weight(bits, group, bits != "ternary", 20, 64), torch.randn(20)
    assert torch.equal(run(tier, torch.zeros(rows, 64), weight, bias, bits, group, int8), bias.expand(rows, 20))
    # 1 / 1e-40 overflows: the codes are zero in the reference too
    x = torch.full((rows, 64), 1e-40)
    expected = reference_linear(x, *weight, None, problem_for(x, weight, bits, group, 64, int8))
    torch.testing.assert_close(run(tier, x, weight, None, bits, group, int8), expected, rtol=1e-3, atol=1e-40)


@EVERY_SCHEME
@ACTIVATIONS
@pytest.mark.parametrize("rows", [1, 20])
def test_unaligned_tensors(tier, scheme, int8, rows):
    # tensors of a mapped file start anywhere
    bits, group = SCHEMES[scheme]
    weight = make_weight(bits, group, False, 19, 136)
    x = torch.randn(rows, 136)
    moved = tuple(None if part is None else shifted_by_one(part) for part in weight)
    want = run(tier, x, weight, None, bits, group, int8)
    assert torch.equal(run(tier, shifted_by_one(x), moved, None, bits, group, int8), want)


def shifted_by_one(tensor):
    """The same values, one element off their alignment."""
    room = tensor.new_empty(tensor.numel() + 1)
    room[1:] = tensor.flatten()
    return room[1:].view(tensor.shape)


def test_bias_of_another_dtype(tier):
    weight, x, bias = make_weight(4, 64, False, 32, 64), torch.randn(3, 64).bfloat16(), torch.randn(32)
    y = run(tier, x, weight, bias, 4, 64, True)
    torch.testing.assert_close(y, run(tier, x, weight, bias.bfloat16(), 4, 64, True), rtol=0.02, atol=0.02)


def test_group_scales_in_float32(tier):
    packed, scale, zero_point = make_weight(4, 64, False, 32, 128)
    x = torch.randn(3, 128)
    want = run(tier, x, (packed, scale, zero_point), None, 4, 64, True)
    torch.testing.assert_close(run(tier, x, (packed, scale.float(), zero_point), None, 4, 64, True), want)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "no code for torch.float64"),
        ({"device": "cuda"}, "the tensors are on cuda"),
        ({"group_size": 20}, "group_size=20 is no multiple of 32"),
        ({"in_features": 1 << 17}, "outside 1 to 65536"),
    ],
    ids=["fp64", "cuda", "odd-group", "too-long"],
)
def test_refusals_say_why(tier, change, reason):
    x = torch.randn(2, 64)
    problem = problem_for(x, make_weight(4, 32, False, 8, 64), 4, 32, 64, True)._replace(**change)
    with use_kernel(tier), pytest.raises(ValueError, match=reason):
        choose(problem)


def test_refused_problems_are_still_computed():
    weight, x = make_weight(4, 20, False, 8, 64), torch.randn(2, 64)
    with torch.no_grad():
        y = linear(x, *weight, None, 4, 64, 20, True)
    torch.testing.assert_close(y, reference_linear(x, *weight, None, problem_for(x, weight, 4, 20, 64, True)))
