"""The torch-only tier against the reference: every way to the product, with and without room for copies."""

import itertools
import sys

import pytest
import torch

from hf_lowbit.functional.dispatch import choose, use_kernel
from hf_lowbit.functional.grid import BITS, dequantize, grid_of
from hf_lowbit.functional.linear import linear, quantize_activations, reference_linear
from hf_lowbit.functional.packing import pack, unpack
from hf_lowbit.kernels import torch_native
from hf_lowbit.kernels.torch_native import activations, blocks, copies, int4, integers
from tests.kernels.native_layers import make, problem_for


# relative to sum |w| |x| + |bias|: two roundings to the dtype, of W or an unscaled sum, then of the result; a folded
# zero point may add as much again
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-20}
SCHEMES = [
    pytest.param(bits, group_size, asymmetric, id=f"{bits}-{group_size}-{'zero-point' if asymmetric else 'symmetric'}")
    for bits, group_size, asymmetric in itertools.product(BITS, (32, 48, 128, None, "tensor"), (False, True))
]
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in TOLERANCE]
ROWS = (0, 1, 2, 15, 16, 17, 64)

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")
needs_int4 = pytest.mark.skipif(not int4.HAS_INT4, reason="torch has no fast int4 product on this processor")
needs_integers = pytest.mark.skipif(not integers.HAS_INTEGERS, reason="torch has no fast integer product here")


def check(x, layer, int8_activations=False, bias=None):
    weight, scale, zero_point, _, bits, width, size = layer
    problem = problem_for(x, layer, int8_activations)
    exact = x.to(torch.float64)
    wide = None if bias is None else bias.to(torch.float64)
    double = problem._replace(dtype=torch.float64)
    expected = reference_linear(exact, weight[0], scale, zero_point, wide, double)
    codes = unpack(weight[0], grid_of(bits), width)
    absolute = dequantize(codes, scale, zero_point, size, torch.float64).abs()
    size_of_terms = exact.abs() @ absolute.t() + (0 if bias is None else wide.abs())
    # the first call makes the copy, the second uses it, with the weight as layers store it
    for stored in (weight[0], weight):
        y = torch_native.run(x, stored, scale, zero_point, bias, problem)
        assert y.dtype == x.dtype and y.shape == expected.shape and y.is_contiguous()
        # results below the smallest normal number are multiples of the smallest subnormal one
        error = (y.to(torch.float64) - expected).abs() - torch.finfo(x.dtype).smallest_normal * torch.finfo(
            x.dtype
        ).eps
        assert bool((error <= TOLERANCE[x.dtype] * size_of_terms).all()), float((error / size_of_terms).max())
    return y


@pytest.mark.parametrize("bits, group_size, asymmetric", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_the_reference(bits, group_size, asymmetric, dtype):
    for shape, rows in itertools.product(((64, 128), (33, 101)), ROWS):
        layer = make(bits, group_size, asymmetric, shape)
        check(torch.randn(rows, shape[1]).to(dtype), layer, bias=torch.randn(shape[0]).to(dtype))


@pytest.mark.parametrize("bits, group_size, asymmetric", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_activations_agree_with_the_reference(bits, group_size, asymmetric, dtype):
    layer = make(bits, group_size, asymmetric, (33, 101))
    for rows in ROWS:
        x = torch.randn(rows, 101).to(dtype)
        if rows:
            x[0] = 0
        check(x, layer, int8_activations=True)


@needs_integers
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("asymmetric", [False, True], ids=["symmetric", "zero-point"])
def test_integer_sums_equal_the_reference(bits, asymmetric):
    # the second is multiplied in the order of torch's matrix library, in parts
    for shape in ((40, 300), (512, 577)):
        layer, bias = make(bits, None, asymmetric, shape), torch.randn(shape[0])
        for rows in (1, 2, 5, 17, 64):
            x = torch.randn(rows, shape[1])
            arguments = (x, layer[0][0], *layer[1:3], bias, problem_for(x, layer, int8_activations=True))
            for _ in range(2):
                assert torch.equal(torch_native.run(*arguments), reference_linear(*arguments))


@pytest.mark.parametrize("bits, group_size, asymmetric", SCHEMES)
@pytest.mark.parametrize("int8_activations", [False, True], ids=["float", "int8"])
def test_agrees_without_room_for_copies(bits, group_size, asymmetric, int8_activations, monkeypatch):
    monkeypatch.setenv(copies.REPACK_VARIABLE, "0")
    held = copies.held_bytes()
    for rows, dtype in itertools.product((1, 5, 64), TOLERANCE):
        layer = make(bits, group_size, asymmetric, (33, 101))
        check(torch.randn(rows, 101).to(dtype), layer, int8_activations)
    assert copies.held_bytes() == held


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 5, 1000], ids=str)
def test_tokens_are_rounded_as_in_the_definition(dtype, size, monkeypatch):
    """Also where the scale overflows, is zero or is no number, and where rows are taken in parts."""
    monkeypatch.setattr(activations, "SMALL", 100)
    monkeypatch.setattr(activations, "PART", 2 * max(size, 1))
    for exponent, rows in itertools.product((-45, -38, -30, 0, 3, 38), (0, 1, 7)):
        x = (torch.randn(rows, size) * 10.0**exponent).to(dtype)
        for row, value in zip(range(rows) if size else (), (float("inf"), 0.0, float("nan")), strict=False):
            x[row, 0] = value
        codes, t = quantize_activations(x)
        found, scale = activations.quantize_tokens(x)
        scale = torch.as_tensor(scale, dtype=torch.float32).expand_as(t)
        finite = torch.isfinite(t)
        assert torch.equal(finite, torch.isfinite(scale)) and torch.equal(t[finite], scale[finite])
        assert torch.equal(codes[finite.view(-1)], found[finite.view(-1)])
        rounded = activations.round_tokens(x, torch.float32)[finite.view(-1)]
        assert torch.equal(rounded, (codes * t)[finite.view(-1)])


@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 7), (16, 2), (17, 1100), (530, 67), (4, 0), (0, 32)], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_odd_shapes(shape, bits, monkeypatch):
    # several blocks, the last one shorter
    monkeypatch.setitem(blocks.BLOCK_WEIGHTS, "cpu", 4096)
    for group_size, rows, dtype in itertools.product((64, None), (1, 5, 33), TOLERANCE):
        check(torch.randn(rows, shape[1]).to(dtype), make(bits, group_size, False, shape))


@pytest.mark.parametrize("rows", [1, 20, 100])
def test_takes_any_strides(rows):
    layer = make(4, 32, False, (48, 64))
    wide = torch.randn(rows, 128).to(torch.bfloat16)
    columns = torch.randn(64, rows).to(torch.bfloat16).t()
    for x in (wide[:, ::2], columns, torch.randn(1, 64).to(torch.bfloat16).expand(rows, 64)):
        check(x, layer)
        check(x, make(8, None, False, (48, 64)))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("int8_activations", [False, True], ids=["float", "int8"])
def test_what_is_not_a_number_stays_in_its_row(bits, bad, int8_activations):
    for group_size, rows in itertools.product((32, None), (2, 20, 64)):
        layer = make(bits, group_size, False, (32, 64))
        x = torch.randn(rows, 64).to(torch.bfloat16)
        x[1, 3] = bad
        for _ in range(3):
            y = torch_native.run(x, layer[0][0], *layer[1:4], problem_for(x, layer, int8_activations))
            # a code of zero times infinity is NaN, and torch's product may skip it; nothing else may come out
            assert not bool(torch.isfinite(y[1]).any()) and bool(torch.isfinite(y[[0]]).all())


def test_unpacks_what_pack_wrote():
    for bits, width in itertools.product(BITS, (1, 2, 3, 7, 8, 9, 33)):
        layer = make(bits, None, False, (5, width))
        codes = blocks.unpack_fast(layer[0][0], problem_for(torch.empty(1, width), layer))
        assert torch.equal(codes, unpack(layer[0][0], grid_of(bits), width))


@needs_int4
@pytest.mark.parametrize("rows", [16, 80, 608])
def test_int4_order_can_be_packed_in_blocks(rows):
    codes = torch.randint(0, 16, (rows, 64), dtype=torch.int32)
    convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    assert torch.equal(convert(codes, 1), torch.cat([convert(part, 1) for part in codes.split(64)]))


@needs_int4
def test_zero_points_that_bfloat16_would_move_are_not_folded():
    codes = torch.full((16, 64), 7, dtype=torch.int8)
    scale, zero_point = torch.full((16, 1), 1.0234375).to(torch.bfloat16), torch.full((16, 1), 7, dtype=torch.int8)
    layer = (pack(codes, grid_of(4)).unsqueeze(0), scale, zero_point, None, 4, 64, 64)
    y = check(torch.randn(2, 64).to(torch.bfloat16), layer)
    assert not bool(y.any())


def test_refuses_with_a_reason(monkeypatch):
    layer = make(4, 32, False, (8, 32))
    problem = problem_for(torch.empty(1, 32), layer)
    assert torch_native.refuse(problem) is None
    assert "float64" in torch_native.refuse(problem._replace(dtype=torch.float64))
    assert "mps" in torch_native.refuse(problem._replace(device="mps"))
    assert "overflow" in torch_native.refuse(problem._replace(int8_activations=True, in_features=1 << 20))
    monkeypatch.setattr(sys, "byteorder", "big")
    assert "endian" in torch_native.refuse(problem)


def test_can_be_forced():
    layer = make(4, 32, False, (8, 32))
    with use_kernel("torch-native"):
        assert choose(problem_for(torch.empty(1, 32), layer)).kernel.name == "torch-native"
        with pytest.raises(ValueError, match="float64"):
            linear(torch.randn(1, 32, dtype=torch.float64), *layer)
