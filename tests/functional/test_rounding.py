"""Rounding: the definition on every grid and scope, at its edges, and without touching its argument."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_lowbit.functional.grid import BITS, dequantize, grid_of, group_count
from hf_lowbit.functional.rounding import CHUNK, round_to_nearest, scale_dtype, to_codes


SCOPES = [pytest.param(4, id="groups"), pytest.param(None, id="channel"), pytest.param("tensor", id="tensor")]
GRIDS = [
    pytest.param("ternary", True, id="ternary"),
    *(
        pytest.param(bits, symmetric, id=f"{bits}-bits" + ("" if symmetric else "-zero-points"))
        for bits in (2, 3, 4, 8)
        for symmetric in (True, False)
    ),
]


# a float32 scale that is found as a quotient of sums may miss the true one in its last bits
LAST_BITS = 2.0**-21


def weights(rows=6, width=10, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def numbers(quantized, group_size, dtype=torch.float32):
    block = group_size if isinstance(group_size, int) else None
    return dequantize(quantized.codes, quantized.scale, quantized.zero_point, block, dtype)


@pytest.mark.parametrize("group_size", [1, 3, 4, 10, 64, None, "tensor"])
@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_shapes_dtypes_and_ranges(bits, symmetric, group_size, device):
    grid = grid_of(bits)
    codes, scale, zero_point = round_to_nearest(weights().to(device), grid, group_size, symmetric)
    shape = (1, 1) if group_size == "tensor" else (6, group_count(10, group_size))
    assert codes.dtype == torch.int8 and codes.shape == (6, 10)
    assert grid.qmin <= int(codes.min()) and int(codes.max()) <= grid.qmax
    assert scale.dtype == (torch.bfloat16 if isinstance(group_size, int) else torch.float32)
    assert scale.dtype == scale_dtype(group_size)
    assert scale.shape == shape and bool((scale > 0).all())
    if symmetric:
        assert zero_point is None
    else:
        assert zero_point.dtype == torch.int8 and zero_point.shape == shape
        assert grid.qmin <= int(zero_point.min()) and int(zero_point.max()) <= grid.qmax


@pytest.mark.parametrize("group_size", SCOPES)
@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_zeros_stay_exact_zeros(bits, symmetric, group_size, device):
    weight = weights(4, 10).to(device)
    weight[1] = 0
    weight[2, 4:8] = 0
    all_zero = round_to_nearest(torch.zeros_like(weight), grid_of(bits), group_size, symmetric)
    mixed = round_to_nearest(weight, grid_of(bits), group_size, symmetric)
    assert not numbers(all_zero, group_size).any()
    assert not numbers(mixed, group_size)[weight == 0].any()
    for quantized in (all_zero, mixed):
        assert bool((torch.isfinite(quantized.scale) & (quantized.scale > 0)).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("group_size", SCOPES)
@pytest.mark.parametrize("bits", BITS)
def test_what_is_no_number_is_refused(bits, group_size, bad):
    weight = weights()
    weight[5, 9] = bad
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        round_to_nearest(weight, grid_of(bits), group_size, symmetric=True)


def test_a_float64_that_float32_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        round_to_nearest(torch.full((1, 4), 1e300, dtype=torch.float64), grid_of(4), None, True)


@pytest.mark.parametrize("exponent", [-100, -40, 40, 100])
@pytest.mark.parametrize("group_size", SCOPES)
@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_a_power_of_two_moves_only_the_scale(bits, symmetric, group_size, exponent):
    plain = round_to_nearest(weights(), grid_of(bits), group_size, symmetric)
    moved = round_to_nearest(weights() * 2.0**exponent, grid_of(bits), group_size, symmetric)
    assert torch.equal(moved.codes, plain.codes)
    assert torch.equal(moved.scale, plain.scale * 2.0**exponent)
    assert symmetric or torch.equal(moved.zero_point, plain.zero_point)


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e38, 3.4e38])
@pytest.mark.parametrize("group_size", SCOPES)
@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_the_ends_of_float32_give_finite_numbers(bits, symmetric, group_size, size):
    weight = torch.tensor([[1, -1, 0.5, 0], [1, 1, 1, 1], [-1, -1, -1, -0.9], [0, 0, 0, 1]]) * size
    quantized = round_to_nearest(weight, grid_of(bits), group_size, symmetric)
    result = numbers(quantized, group_size)
    assert bool((torch.isfinite(quantized.scale) & (quantized.scale > 0)).all())
    assert bool(torch.isfinite(result).all())
    assert not result[weight == 0].any()
    # rounding may lose what it can't hold, but not invent
    assert float(result.abs().max()) <= 2 * size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_every_float_dtype_rounds_as_its_float32(bits, symmetric, dtype):
    weight = weights().to(dtype)
    ours = round_to_nearest(weight, grid_of(bits), 4, symmetric)
    plain = round_to_nearest(weight.float(), grid_of(bits), 4, symmetric)
    assert all(a is b or torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("search", [True, False], ids=["search", "plain"])
@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_a_group_does_not_see_its_neighbours(bits, symmetric, search):
    weight, grid = weights(6, 12), grid_of(bits)
    whole = round_to_nearest(weight, grid, 4, symmetric, search)
    for g in range(3):
        columns = slice(4 * g, 4 * g + 4)
        alone = round_to_nearest(weight[:, columns], grid, 4, symmetric, search)
        assert torch.equal(whole.codes[:, columns], alone.codes)
        assert torch.equal(whole.scale[:, g : g + 1], alone.scale)


@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_a_short_last_group_is_rounded_for_itself(bits, symmetric):
    weight, grid = weights(6, 10), grid_of(bits)
    weight[:, 8:] *= 100
    short = round_to_nearest(weight, grid, 4, symmetric, search=False)
    alone = round_to_nearest(weight[:, 8:], grid, 4, symmetric, search=False)
    assert torch.equal(short.codes[:, 8:], alone.codes)
    assert torch.equal(short.scale[:, 2:], alone.scale)


@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_scopes_are_groups_of_another_size(bits, symmetric):
    weight, grid = weights(6, 10), grid_of(bits)
    channel = round_to_nearest(weight, grid, None, symmetric)
    tensor = round_to_nearest(weight, grid, "tensor", symmetric)
    flat = round_to_nearest(weight.reshape(1, -1), grid, None, symmetric)
    assert torch.equal(tensor.codes, flat.codes.view(6, 10)) and torch.equal(tensor.scale, flat.scale)
    for row in range(6):
        alone = round_to_nearest(weight[row : row + 1], grid, "tensor", symmetric)
        assert torch.equal(channel.codes[row : row + 1], alone.codes)
    larger = [round_to_nearest(weight, grid, size, symmetric) for size in (10, 11, 4096)]
    assert all(torch.equal(larger[0].codes, other.codes) for other in larger[1:])


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("group_size", SCOPES)
@pytest.mark.parametrize("bits", ["ternary", 4])
def test_an_empty_weight_has_empty_codes(bits, group_size, shape):
    codes, scale, _ = round_to_nearest(torch.zeros(shape), grid_of(bits), group_size, symmetric=True)
    assert codes.shape == shape
    assert bool(torch.isfinite(scale).all())


@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_the_argument_is_not_changed(bits, symmetric):
    weight = weights().requires_grad_()
    strided = weights(10, 6).t()
    for tensor, plain in ((weight, weights()), (strided, weights(10, 6).t().contiguous())):
        for group_size in (4, None, "tensor"):
            quantized = round_to_nearest(tensor, grid_of(bits), group_size, symmetric)
            assert torch.equal(quantized.codes, round_to_nearest(plain, grid_of(bits), group_size, symmetric).codes)
            assert not quantized.scale.requires_grad
        assert torch.equal(tensor, plain)


@pytest.mark.parametrize("group_size", SCOPES)
def test_ternary_is_absmean(group_size):
    """BitNet b1.58, eq. 1-3: gamma = mean|W|, RoundClip(W / gamma, -1, 1), written in float64."""
    weight = weights(6, 10)
    codes, scale, _ = round_to_nearest(weight, grid_of("ternary"), group_size, symmetric=True)
    w = weight.double().numpy()
    if group_size == "tensor":
        gamma = np.full_like(w, np.abs(w).mean())
    elif group_size is None:
        gamma = np.abs(w).mean(axis=1, keepdims=True).repeat(10, axis=1)
    else:
        means = [np.abs(w[:, start : start + 4]).mean(axis=1, keepdims=True) for start in (0, 4, 8)]
        # a group's scale is stored in bfloat16, and its codes belong to the stored one
        means = [torch.from_numpy(mean).to(scale.dtype).double().numpy() for mean in means]
        gamma = np.concatenate([m.repeat(n, axis=1) for m, n in zip(means, (4, 4, 2), strict=True)], axis=1)
    assert np.array_equal(codes.numpy(), np.clip(np.rint(w / gamma), -1, 1))
    assert np.array_equal(numbers((q := round_to_nearest(weight, grid_of("ternary"), group_size, True)), group_size),
                          (q.codes.numpy() * gamma.astype(np.float32)).astype(np.float32))  # fmt: skip


@given(st.sampled_from(BITS), st.booleans(), st.sampled_from([3, None, "tensor"]), st.integers(0, 1000))
def test_codes_survive_their_own_numbers(bits, asymmetric, group_size, seed):
    """to_codes undoes dequantize exactly: a low-bit checkpoint that is requantized with its scales does not drift."""
    grid, generator = grid_of(bits), torch.Generator().manual_seed(seed)
    shape = (1, 1) if group_size == "tensor" else (4, group_count(7, group_size))
    codes = torch.randint(grid.qmin, grid.qmax + 1, (4, 7), dtype=torch.int8, generator=generator)
    scale = (torch.rand(shape, generator=generator) + 0.01).to(scale_dtype(group_size))
    zero_point = None
    if asymmetric:
        zero_point = torch.randint(grid.qmin, grid.qmax + 1, shape, dtype=torch.int8, generator=generator)
    block = group_size if isinstance(group_size, int) else None
    assert torch.equal(to_codes(dequantize(codes, scale, zero_point, block), grid, scale, zero_point, block), codes)


@pytest.mark.parametrize("group_size", SCOPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_on_a_grid_stay_there(bits, group_size):
    """Requantizing finds the same grid again wherever a group reaches its largest code, without zero points."""
    grid = grid_of(bits)
    codes = torch.randint(-grid.qmax, grid.qmax + 1, (6, 8), generator=torch.Generator().manual_seed(0))
    codes[:, ::4] = grid.qmax
    weight = codes * 0.0625
    again = round_to_nearest(weight, grid, group_size, symmetric=True)
    assert torch.equal(again.codes, codes.to(torch.int8))
    assert torch.equal(again.scale.to(torch.bfloat16), torch.full_like(again.scale, 0.0625, dtype=torch.bfloat16))
    assert torch.allclose(numbers(again, group_size), weight, rtol=LAST_BITS, atol=0)


def test_the_result_does_not_depend_on_the_number_of_threads():
    weight = torch.randn(2 * CHUNK // 64 + 1, 64, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = round_to_nearest(weight, grid_of(3), 32, symmetric=False)
        torch.set_num_threads(3)
        three = round_to_nearest(weight, grid_of(3), 32, symmetric=False)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


def test_inference_mode_reaches_the_threads():
    with torch.inference_mode():
        weight = torch.randn(2 * CHUNK // 64 + 1, 64)
        assert round_to_nearest(weight, grid_of(4), 32, symmetric=True).codes.shape == weight.shape
