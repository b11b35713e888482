"""Products with low-bit live blocks by the C library: the reference's bits, on every tier this processor has."""

import pytest
import torch
import torch.nn.functional as F

import hf_lowbit.kernels  # noqa: F401
from hf_lowbit.functional.block_code_linear import (
    block_code_linear,
    problem_of,
    reference_block_code_linear,
)
from hf_lowbit.functional.block_codes import dequantize_blocks, quantize_blocks
from hf_lowbit.functional.block_dispatch import choose_blocks, explain_blocks
from hf_lowbit.functional.block_masks import scatter
from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.functional.grid import grid_of
from hf_lowbit.functional.packing import pack, unpack
from hf_lowbit.kernels.cpu import library
from hf_lowbit.kernels.cpu.blocks import run
from hf_lowbit.kernels.cpu.record import TIERS, refuse_tier
from tests.kernels.test_cpu_blocks import CASES, TOLERANCE, product, weights


TIER_NAMES = [name for name in TIERS if refuse_tier(name) is None]
pytestmark = pytest.mark.skipif(library.load().handle is None, reason=f"no C library: {library.load().reason}")
BITS = [8, 4, "ternary"]
ROWS = (0, 1, 2, 4, 5, 8, 9, 16, 17, 33)


def codes(shape, block, balance, bits, seed=0):
    """(stored, scale, columns, pointers), with codes over the whole grid, the least included."""
    _, values, columns, pointers = weights(shape, block, balance, torch.float32, seed)
    grid, generator = grid_of(bits), torch.Generator().manual_seed(seed)
    q = torch.randint(grid.qmin, grid.qmax + 1, values.shape, generator=generator, dtype=torch.int8)
    scale = (torch.rand(values.shape[:-1], generator=generator) * 0.02 + 0.005).bfloat16()
    return pack(q.reshape(-1, block[1]), grid).view(*values.shape[:-1], -1), scale, columns, pointers


def by_tier(tier, x, stored, scale, columns, pointers, bits, width, int8=False):
    problem = problem_of(x, stored, pointers, bits, width, int8)
    return run(TIERS[tier][0], x, stored, columns, pointers, problem, scale)


def by_digits(x, stored, scale, columns, pointers, bits, width):
    """What few rows of floats give: the definition for int8, two digits at a time, over x = t sum_d 256^d r_d."""
    whole, count = (127.0 * 2**24, 4) if x.dtype == torch.float32 else (127.0 * 2**16, 3)
    rows = []
    for row in x.float():
        top = row.abs().max().double()
        if count == 4:
            scaled, unit = row.double() * (whole / top), whole
        else:
            factor = (whole / top).float()
            scaled, unit = row * factor, factor.double() * top
        r = torch.trunc(scaled + torch.where(scaled < 0, -0.5, 0.5)).long()
        sums = torch.zeros(block_outputs(stored, pointers))
        for d in range(0, count, 2):
            # the range of two balanced digits
            pair = (r + 128 * 257) % 65536 - 128 * 257
            r = (r - pair) >> 16
            t = (top / unit).float() * float(1 << 8 * d)
            sums = sums + unscaled(pair[None], stored, scale, columns, pointers, bits, width)[0] * t
        rows.append(sums)
    return torch.stack(rows).to(x.dtype)


def block_outputs(stored, pointers):
    return (stored.shape[0] if pointers is None else len(pointers) - 1) * stored.shape[-2]


def unscaled(a, stored, scale, columns, pointers, bits, width):
    """Block by block, in order: exact sums of integers a [1, K], times the scale, added up in float32."""
    height = stored.shape[-2]
    q = unpack(stored, grid_of(bits), width).reshape(-1, height, width).double()
    s, c = scale.reshape(-1, height).float(), columns.reshape(-1)
    count = stored.shape[0] if pointers is None else len(pointers) - 1
    ends = pointers if pointers is not None else torch.arange(count + 1) * stored.shape[1]
    a = F.pad(a.double(), (0, -a.shape[1] % width)).unflatten(1, (-1, width))
    y = torch.zeros(a.shape[0], count, height)
    for r in range(count):
        for b in range(int(ends[r]), int(ends[r + 1])):
            y[:, r] += (a[:, c[b]] @ q[b].T).float() * s[b]
    return y.flatten(1)


@pytest.mark.parametrize("tier", TIER_NAMES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("balance", ["row", "none"])
@pytest.mark.parametrize(("shape", "block"), CASES, ids=str)
def test_int8_activations_give_the_bits_of_the_reference(tier, bits, balance, shape, block):
    stored = codes(shape, block, balance, bits)
    for rows, dtype in zip(ROWS, [torch.float32, torch.bfloat16, torch.float16] * 4, strict=False):
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
        expected = reference_block_code_linear(x, *stored, bits, block[1], True)
        y = by_tier(tier, x, *stored, bits, block[1], int8=True)
        assert y.dtype == dtype and torch.equal(y, expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("balance", ["row", "none"])
def test_the_reference_adds_exact_sums_in_the_order_of_the_blocks(balance, bits):
    stored = codes((70, 90), (8, 24), balance, bits)
    x = torch.randn(3, 90)
    t = x.abs().amax(1, keepdim=True) / 127
    a = torch.round(x * (x.abs().amax(1, keepdim=True).reciprocal() * 127))
    expected = unscaled(a, *stored, bits, 24) * t
    assert torch.equal(reference_block_code_linear(x, *stored, bits, 24, True), expected)


@pytest.mark.parametrize("tier", TIER_NAMES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("balance", ["row", "none"])
def test_many_rows_of_floats_give_the_bits_of_float_blocks(tier, bits, dtype, balance):
    for shape, block in CASES:
        stored, scale, columns, pointers = codes(shape, block, balance, bits)
        values = dequantize_blocks(stored, scale, bits, block[1], dtype)
        for rows in (9, 17):
            x = torch.randn(rows, shape[1]).to(dtype)
            y = by_tier(tier, x, stored, scale, columns, pointers, bits, block[1])
            assert torch.equal(y, product(tier, x, values, columns, pointers))


@pytest.mark.parametrize("tier", TIER_NAMES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("balance", ["row", "none"])
def test_few_rows_of_floats_are_products_of_digits(tier, bits, dtype, balance):
    for shape, block in CASES:
        stored, scale, columns, pointers = codes(shape, block, balance, bits)
        values = dequantize_blocks(stored, scale, bits, block[1]).double()
        dense = scatter(values, columns, pointers, shape, block)
        x = torch.randn(2, shape[1]).to(dtype)
        # language models have activations a thousand times the others
        x[1, 1] = 1000.0
        y = by_tier(tier, x, stored, scale, columns, pointers, bits, block[1])
        if tier not in ("cpu-avx2", "cpu-portable"):
            assert torch.equal(y, by_digits(x, stored, scale, columns, pointers, bits, block[1]))
        size = (x.double().square().sum(1, keepdim=True) * dense.abs().max() ** 2).sqrt()
        error = (y[:, : shape[0]].double() - F.linear(x.double(), dense)).abs()
        assert (error <= TOLERANCE[dtype] * F.linear(x.double().abs(), dense.abs()) + 1e-5 * size).all()


@pytest.mark.parametrize("tier", TIER_NAMES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_nan_infinity_and_zeros(tier, int8, rows):
    stored, scale, columns, pointers = codes((64, 128), (32, 32), "row", 4)
    dense = scatter(dequantize_blocks(stored, scale, 4, 32), columns, pointers, (64, 128), (32, 32))
    for bad in (float("nan"), float("inf")):
        x = torch.randn(rows, 128)
        x[0, 40] = bad
        y = by_tier(tier, x, stored, scale, columns, pointers, 4, 32, int8)
        # a row that is rounded to 8 bits has no scale then
        seen = torch.ones(64, dtype=torch.bool) if int8 else dense[:, 40] != 0
        assert not y[0, seen].isfinite().any() and y[1:].isfinite().all()
        if not int8:
            unseen = dense[:, 32:64].abs().sum(1) == 0
            assert y[0, unseen].isfinite().all()
    assert (by_tier(tier, torch.zeros(rows, 128), stored, scale, columns, pointers, 4, 32, int8) == 0).all()


@pytest.mark.parametrize("tier", TIER_NAMES)
@pytest.mark.parametrize("int8", [False, True])
def test_strides_of_x_and_threads(tier, int8):
    stored = codes((192, 256), (32, 64), "none", 8)
    wide, threads = torch.randn(20, 512), torch.get_num_threads()
    try:
        for rows in (1, 6, 20):
            x = wide[:rows, 128:384]
            torch.set_num_threads(1)
            alone = by_tier(tier, x.contiguous(), *stored, 8, 64, int8)
            for count in (1, 3):
                torch.set_num_threads(count)
                assert torch.equal(by_tier(tier, x, *stored, 8, 64, int8), alone)
                assert torch.equal(by_tier(tier, wide[:rows, ::2], *stored, 8, 64, int8),
                                   by_tier(tier, wide[:rows, ::2].contiguous(), *stored, 8, 64, int8))  # fmt: skip
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("balance", ["row", "none"])
def test_the_operator_and_its_gradient(balance, int8):
    shape, block = (130, 300), (13, 20)
    _, values, columns, pointers = weights(shape, block, balance, torch.float32)
    stored, scale = quantize_blocks(values, 4)
    dense = scatter(dequantize_blocks(stored, scale, 4, 20), columns, pointers, shape, block)
    x = torch.randn(2, 7, 300, requires_grad=True)
    bias = torch.randn(130)
    y = block_code_linear(x, stored, scale, columns, bias, 300, 4, 20, pointers, int8)
    expected = F.linear(x, dense, bias)
    assert (y - expected).norm() <= (0.02 if int8 else 1e-5) * expected.norm()
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, torch.ones(2, 7, 130) @ dense, atol=1e-4, rtol=1e-4)
    torch.library.opcheck(
        torch.ops.hf_lowbit.block_code_linear.default,
        (torch.randn(3, 300), stored, scale, columns, pointers, 4, 20, int8),
        test_utils=("test_schema", "test_faketensor"),
    )
    with pytest.raises(ValueError, match="Expected 300 input features. Got 299"):
        block_code_linear(x[..., :-1], stored, scale, columns, None, 300, 4, 20, pointers)
    with pytest.raises(TypeError, match="floating-point"):
        block_code_linear(x.int(), stored, scale, columns, None, 300, 4, 20, pointers)


def test_the_choice_is_explained():
    stored, _, _, pointers = codes((64, 128), (32, 32), "row", "ternary")
    problem = problem_of(torch.randn(1, 128), stored, pointers, "ternary", 32, True)
    best = next((name for name in TIERS if name in TIER_NAMES and name != "cpu-portable"), "torch")
    name, why = explain_blocks(problem)[-1]
    assert name == best and "int8 activations with ternary blocks of 32x32" in why
    with use_kernel("reference"):
        assert choose_blocks(problem) is None
    double = problem._replace(dtype=torch.float64)
    assert choose_blocks(double) is None and "no code for torch.float64" in dict(explain_blocks(double))["cpu-amx"]
