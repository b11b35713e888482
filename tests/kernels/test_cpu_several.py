"""Products of several weights with one x in one call of the C library: the bits of one call each, on every tier."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.functional.several import MOST_WEIGHTS, linear_several
from tests.kernels.weights import SIZES, make_weight, run, schemes


def together(tier, x, weights, biases, bits, group, int8, key=None):
    block = group if isinstance(group, int) else None
    # keys stand for shapes: a new one each time
    key = object() if key is None else key
    with torch.no_grad(), use_kernel(tier):
        given = [(*weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return linear_several(x, given, bits, x.shape[-1], block, int8, key)


def one_by_one(tier, x, weights, biases, bits, group, int8):
    return [run(tier, x, weight, bias, bits, group, int8) for weight, bias in zip(weights, biases, strict=True)]


def same(left, right):
    """Equal bits, NaN included."""
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(left, right, strict=True)
    )  # fmt: skip


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scheme=schemes(),
    rows=st.sampled_from([0, 1, 2, 4, 5, 8, 9, 12, 13, 16, 17, 33]),
    widths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    in_features=SIZES,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    int8=st.booleans(),
    biased=st.lists(st.sampled_from([None, torch.float32, torch.bfloat16]), min_size=4, max_size=4),
)
def test_bits_of_one_call_a_weight(tier, scheme, rows, widths, in_features, dtype, int8, biased):
    bits, group, asymmetric = scheme
    weights = [make_weight(bits, group, asymmetric, width, in_features, seed) for seed, width in enumerate(widths)]
    biases = [None if kind is None else torch.randn(width).to(kind)
              for width, kind in zip(widths, biased, strict=False)]  # fmt: skip
    x = torch.randn(rows, in_features).to(dtype)
    scheme = bits, group, int8
    assert same(together(tier, x, weights, biases, *scheme), one_by_one(tier, x, weights, biases, *scheme))


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
@pytest.mark.parametrize("form", ["nan", "infinity", "zeros", "strided", "expanded", "batches"])
def test_unusual_inputs(tier, form, int8):
    x = {
        "nan": torch.randn(3, 128).index_fill(1, torch.tensor([5]), float("nan")),
        "infinity": torch.randn(1, 128).index_fill(1, torch.tensor([5]), float("inf")),
        "zeros": torch.zeros(2, 128),
        "strided": torch.randn(128, 5).t(),
        "expanded": torch.randn(1, 128).expand(7, 128),
        "batches": torch.randn(2, 3, 256)[:, :, ::2],
    }[form]
    weights = [make_weight(4, 64, False, width, 128, width) for width in (48, 16)]
    scheme = [None, None], 4, 64, int8
    results = together(tier, x, weights, *scheme)
    assert same(results, one_by_one(tier, x, weights, *scheme))
    assert results[0].isnan().any() == (form in ("nan", "infinity"))


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_bits_do_not_depend_on_threads(tier, rows, int8):
    weights = [make_weight(4, 64, True, width, 1056, width) for width in (1037, 65)]
    x, before, results = torch.randn(rows, 1056), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(together(tier, x, weights, [None, None], 4, 64, int8))
    finally:
        torch.set_num_threads(before)
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_as_many_weights_as_a_call_takes(tier):
    weights = [make_weight(8, None, False, 17, 64, seed) for seed in range(MOST_WEIGHTS)]
    x, scheme = torch.randn(2, 64), ([None] * MOST_WEIGHTS, 8, None, True)
    assert same(together(tier, x, weights, *scheme), one_by_one(tier, x, weights, *scheme))


def test_scales_of_several_dtypes_are_not_multiplied_together(tier):
    first, second = (make_weight(4, 64, False, 8, 128, seed) for seed in range(2))
    second = second[0], second[1].to(torch.float32), second[2]
    assert "dtypes" in together(tier, torch.randn(1, 128), [first, second], [None, None], 4, 64, True)


@pytest.mark.parametrize("kernel", ["reference", "torch-native"])
def test_other_kernels_say_that_they_do_not(kernel):
    weights = [make_weight(4, 64, False, 8, 128, seed) for seed in range(2)]
    assert kernel in together(kernel, torch.randn(1, 128), weights, [None, None], 4, 64, True)


def test_a_wrong_width_is_refused(tier):
    weights = [make_weight(4, 64, False, 8, 128, seed) for seed in range(2)]
    with use_kernel(tier), pytest.raises(ValueError, match="128 input features"):
        linear_several(torch.randn(1, 120), [(*weight, None) for weight in weights], 4, 128, 64, True, object())
