"""The torch-only tier against the reference, and the life of the copies it keeps."""

import copy
import gc
import io
import itertools
import pickle
import sys
import threading

import pytest
import torch

from hf_lowbit.functional.dispatch import choose, use_kernel
from hf_lowbit.functional.grid import BITS, TERNARY, dequantize, grid_of, group_count
from hf_lowbit.functional.linear import linear, problem_of, reference_linear
from hf_lowbit.functional.packing import pack, unpack
from hf_lowbit.kernels import torch_native
from hf_lowbit.kernels.torch_native import blocks, copies, int4, integers


# relative to sum |w| |x| + |bias|: two roundings to the dtype, of W or an unscaled sum, then of the result; a folded
# zero point may add as much again
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-20}
SCHEMES = [
    pytest.param(bits, group_size, asymmetric, id=f"{bits}-{group_size}-{'zero-point' if asymmetric else 'symmetric'}")
    for bits, group_size, asymmetric in itertools.product(BITS, (32, 48, 128, None, "tensor"), (False, True))
]
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in TOLERANCE]
ROWS = (0, 1, 2, 15, 16, 17, 64)

needs_int4 = pytest.mark.skipif(not int4.HAS_INT4, reason="torch has no fast int4 product on this processor")
needs_integers = pytest.mark.skipif(not integers.HAS_INTEGERS, reason="torch has no fast integer product here")


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    """Products this small are slower with more; inputs are the same in every run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def make(bits, group_size, asymmetric, shape, seed=0):
    """Arguments of `linear` after x: weight, scale, zero_point, bias=None, bits, in_features, group_size."""
    rows, width = shape
    generator = torch.Generator().manual_seed(seed)
    grid = grid_of(bits)
    size = group_size if isinstance(group_size, int) else None
    scales = (1, 1) if group_size == "tensor" else (rows, group_count(width, size))
    codes = torch.randint(grid.qmin, grid.qmax + 1, shape, dtype=torch.int8, generator=generator)
    scale = torch.rand(scales, generator=generator) * 0.1 + 0.01
    zero_point = torch.randint(grid.qmin // 2, grid.qmax // 2 + 1, scales, dtype=torch.int8, generator=generator)
    return (
        pack(codes, grid).unsqueeze(0), scale.to(torch.bfloat16) if size else scale,
        zero_point if asymmetric else None, None, bits, width, size,
    )  # fmt: skip


def problem_for(x, layer, int8_activations=False):
    weight, scale, zero_point, _, bits, width, size = layer
    return problem_of(x, weight[0], scale, zero_point, bits, width, size or 0, int8_activations)


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
    # the first call has no copy, the second makes it, the third uses it
    for _ in range(3):
        y = torch_native.run(x, weight[0], scale, zero_point, bias, problem)
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
    layer = make(bits, None, asymmetric, (40, 300))
    for rows in (1, 2, 5, 17, 64):
        x = torch.randn(rows, 300)
        arguments = (x, layer[0][0], *layer[1:4], problem_for(x, layer, int8_activations=True))
        for _ in range(3):
            assert torch.equal(torch_native.run(*arguments), reference_linear(*arguments))


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


def warm(layer, rows=1):
    """Two calls of `linear`: the second makes the copy."""
    x = torch.ones(rows, layer[5]).to(torch.bfloat16)
    with torch.no_grad(), use_kernel("torch-native"):
        linear(x, *layer)
        return linear(x, *layer)


@needs_int4
def test_a_changed_weight_scale_or_zero_point_is_seen():
    weight, scale, zero_point, *rest = make(3, 32, True, (16, 64))
    other = make(3, 32, True, (16, 64), seed=1)
    expected = reference_of(other)
    warm((weight, scale, zero_point, *rest))
    for tensor, new in zip((weight, scale, zero_point), other[:3], strict=True):
        tensor.copy_(new)
        changed = (weight, scale, zero_point, *rest)
        torch.testing.assert_close(warm(changed), reference_of(changed), rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(warm((weight, scale, zero_point, *rest)), expected, rtol=2**-6, atol=2**-6)


@needs_int4
def test_new_scales_at_an_old_address_are_seen():
    weight, scale, _, *rest = make(4, 32, False, (16, 64))
    for factor in (1, 2, 3, 4):
        layer = (weight, scale * factor, None, *rest)
        torch.testing.assert_close(warm(layer), reference_of(layer), rtol=2**-6, atol=2**-6)
        del layer


def reference_of(layer):
    x = torch.ones(1, layer[5]).to(torch.bfloat16)
    return reference_linear(x, layer[0][0], *layer[1:4], problem_for(x, layer))


@needs_int4
def test_copies_die_with_the_weight():
    gc.collect()
    before = copies.held_bytes()
    layer = make(4, 32, False, (64, 64))
    warm(layer)
    # the codes again, and two bfloat16 a group
    assert copies.held_bytes() - before == 64 * 32 + 64 * 2 * 4
    del layer
    gc.collect()
    assert copies.held_bytes() == before


@needs_int4
def test_deepcopy_and_pickle_leave_copies_behind():
    parameter = torch.nn.Parameter(make(4, 32, False, (64, 64))[0], requires_grad=False)
    _, *rest = make(4, 32, False, (64, 64))
    file, size = io.BytesIO(), len(pickle.dumps(parameter))
    y = warm((parameter, *rest))
    assert len(pickle.dumps(parameter)) == size
    torch.save(parameter, file)
    file.seek(0)
    held = copies.held_bytes()
    twins = [copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter)), torch.load(file)]
    assert copies.held_bytes() == held
    for twin in twins:
        assert torch.equal(warm((twin, *rest)), y)


@needs_int4
@pytest.mark.parametrize("limit", ["0", "100"])
def test_copies_are_bounded(monkeypatch, limit):
    monkeypatch.setenv(copies.REPACK_VARIABLE, limit)
    gc.collect()
    before = copies.held_bytes()
    layer = make(4, 32, False, (64, 64))
    torch.testing.assert_close(warm(layer), reference_of(layer), rtol=2**-6, atol=2**-6)
    assert copies.held_bytes() == before
    monkeypatch.setenv(copies.REPACK_VARIABLE, "much")
    with pytest.raises(ValueError, match="much"):
        copies.repack_limit()


@needs_int4
def test_tensors_of_inference_mode_work_without_copies():
    with torch.inference_mode():
        layer = make(4, 32, False, (64, 64))
        before = copies.held_bytes()
        torch.testing.assert_close(warm(layer), reference_of(layer), rtol=2**-6, atol=2**-6)
    assert copies.held_bytes() == before
    # and buffers first made there serve ordinary tensors afterwards
    check(torch.randn(64, 64), make(4, 32, False, (64, 64)))


def test_threads_do_not_share_blocks():
    layers = [make(TERNARY, 32, False, (200, 96), seed) for seed in range(4)]
    expected = [warm(layer, rows=64) for layer in layers]
    failures = []

    def work(layer, y):
        failures.extend(1 for _ in range(30) if not torch.equal(warm(layer, rows=64), y))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(layers, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
