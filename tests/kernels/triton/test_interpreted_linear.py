"""The Triton kernels in Triton's interpreter, against the definition, on every scheme and many shapes.

The interpreter shows that indices, masks, unpacking and order are right. It rounds to bfloat16 by cutting and can't
multiply it, so bfloat16 runs in float32 there (UPCAST), and float16 stands for the way of 16-bit numbers.
"""

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hf_lowbit.functional.grid import BITS, grid_of
from hf_lowbit.functional.linear import quantize_activations, reference_linear
from hf_lowbit.functional.packing import pack
from hf_lowbit.kernels.triton.plans import can_use_words, group_of, plan_for
from tests.kernels.triton.conditions import SCALE_FIRST, TILES, WORDS, in_parts, need_interpreter
from tests.kernels.weights import expected_and_size, make_weight, problem_for, schemes


need_interpreter()

# numpy, which interprets, warns of infinities that the tests are about
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# sums are float32, in another order than the reference's; relative to the root of the summed squares of the terms
FLOAT_SUM = 4 * torch.finfo(torch.float32).eps
# scale first rounds each weight to x's dtype, the others nothing but the result
ROUNDINGS = {True: 2.0, False: 1.0}
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 96, 127, 128, 129, 192, 256]))


def product(*arguments):
    from hf_lowbit.kernels.triton.product import product as run

    return run(*arguments)


def agrees(x, weight, bits, group, int8, plan=None, bias=None):
    """Run one product and compare; returns y."""
    problem = problem_for(x, weight, bits, group, x.shape[1], int8)
    plan = plan_for(problem, (9, 0), 8, True) if plan is None else plan
    y = product(x, *weight, bias, problem, plan)
    assert y.dtype == x.dtype and y.shape == (x.shape[0], weight[0].shape[0])
    if int8 and not group_of(problem):
        # integers only, and the same float32 operations after them
        assert torch.equal(y, reference_linear(x, *weight, bias, problem))
    expected, size = expected_and_size(x, weight, bits, group, bias, int8)
    # the result is rounded to x's dtype; float16 loses more below its smallest normal number
    info = torch.finfo(x.dtype)
    rounding = ROUNDINGS[plan.scale_first] * info.eps * (size + expected.abs()) + info.smallest_normal * info.eps
    assert ((y.to(torch.float64) - expected).abs() <= rounding + FLOAT_SUM * size).all()
    return y


@settings(max_examples=60)
@given(schemes(), SIZES, SIZES, st.integers(1, 20), st.integers(1, 3), st.booleans(), st.booleans(), DTYPES)
def test_tiles(scheme, out_features, in_features, rows, parts, int8, scale_first, dtype):
    bits, group, asymmetric = scheme
    weight = make_weight(bits, group, asymmetric, out_features, in_features, seed=rows)
    x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).to(dtype)
    bias = torch.linspace(-1, 1, out_features).to(dtype) if parts != 2 else None
    problem = problem_for(x, weight, bits, group, in_features, int8)
    plan = in_parts(SCALE_FIRST if scale_first else TILES, problem, parts)
    agrees(x, weight, bits, group, int8, plan, bias)


@settings(max_examples=50)
@given(schemes(), SIZES, st.integers(1, 40), st.integers(1, 3), DTYPES)
def test_words(scheme, out_features, steps, parts, dtype):
    bits, group, asymmetric = scheme
    # rows are whole words
    in_features = 16 * steps
    weight = make_weight(bits, group, asymmetric, out_features, in_features, seed=steps)
    x = torch.randn(1, in_features, generator=torch.Generator().manual_seed(steps)).to(dtype)
    bias = torch.linspace(-1, 1, out_features).to(dtype) if parts != 2 else None
    problem = problem_for(x, weight, bits, group, in_features, True)
    if not can_use_words(problem, True):
        assert bits == 3
        return
    agrees(x, weight, bits, group, True, in_parts(WORDS, problem, parts), bias)


@pytest.mark.parametrize("in_features", [1, 5, 7, 13, 26, 31])
@pytest.mark.parametrize("bits", BITS)
def test_words_of_rows_that_end_inside_a_word(bits, in_features):
    weight = make_weight(bits, None, False, 9, in_features)
    x = torch.randn(1, in_features)
    problem = problem_for(x, weight, bits, None, in_features, True)
    if can_use_words(problem, True):
        agrees(x, weight, bits, None, True, in_parts(WORDS, problem, 1))


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 17, 65, 257])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_plans_of_the_tables(capability, rows, int8):
    weight = make_weight(4, 64, True, 130, 320)
    x = torch.randn(rows, 320).half()
    problem = problem_for(x, weight, 4, 64, 320, int8)
    agrees(x, weight, 4, 64, int8, plan_for(problem, capability, 132, True), torch.randn(130).half())


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 300), st.sampled_from([1, 2, 4]), DTYPES, st.integers(-130, 100))
@example(1, 22, 1, torch.float32, -127)
def test_activations_are_quantized_as_by_the_reference(rows, width, planes, dtype, exponent):
    from hf_lowbit.kernels.triton.product import quantize

    # the interpreter takes a bfloat16 number below the smallest normal one for 0; half a step is the smallest here
    assume(dtype != torch.bfloat16 or 2.0 ** (exponent - 1) >= torch.finfo(dtype).smallest_normal)
    generator = torch.Generator().manual_seed(width)
    # halves of a step occur, where rounding to even decides
    x = torch.randint(-254, 255, (rows, width), generator=generator) / 2 * 2.0**exponent
    x = torch.cat([x, torch.randn(rows, width, generator=generator)]).to(dtype)
    codes, token_scale = quantize(x, planes)
    expected, t = quantize_activations(x)
    flat = codes.transpose(1, 2).flatten(1)
    finite = torch.isfinite(t[:, 0])
    assert torch.equal(flat[finite, :width], expected[finite]) and not flat[:, width:].any()
    torch.testing.assert_close(token_scale, t[:, 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [bits for bits in BITS if bits != 8])
def test_bits_of_bfloat16_numbers(bits):
    """The interpreter can't subtract in bfloat16; what it would subtract from must be 128 + field."""
    from tests.kernels.triton.probes import bits_kernel

    grid = grid_of(bits)
    codes = torch.arange(100).remainder(grid.levels + 1).add(grid.qmin).to(torch.int8)
    for one, base, dtype in ((0x4300, 128, torch.bfloat16), (0x6400, 1024, torch.float16)):
        out = torch.empty(100, dtype=torch.int16)
        bits_kernel[(1,)](pack(codes, grid), out, 100, grid.field_bits, one, 128)
        assert torch.equal(out.view(dtype).float() - base + grid.qmin, codes.float())
