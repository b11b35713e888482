"""Products of many experts in one call of the C library: the bits of one call an expert, on every tier."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.functional.experts import experts_linear
from tests.kernels.weights import SIZES, make_weight, run, schemes


def stack(count, *scheme):
    """Stored tensors of experts, [E, 1, N, R] and so on, and the list of them."""
    weights = [make_weight(*scheme, seed=seed) for seed in range(count)]
    packed, scale, zero = zip(*weights, strict=True)
    return (
        torch.stack(packed).unsqueeze(1),
        torch.stack(scale),
        None if zero[0] is None else torch.stack(zero),
    ), weights


def together(tier, x, offsets, stored, bias, bits, group, int8):
    with torch.no_grad(), use_kernel(tier):
        block = group if isinstance(group, int) else None
        return experts_linear(x, offsets, *stored, bias, bits, x.shape[1], block, int8)


def one_by_one(tier, x, offsets, weights, bias, bits, group, int8):
    parts = [x.new_zeros(int(offsets[0]), weights[0][0].shape[0])]
    for e, weight in enumerate(weights):
        own = x[offsets[e] : offsets[e + 1]]
        parts.append(run(tier, own, weight, None if bias is None else bias[e], bits, group, int8))
    return torch.cat([*parts, x.new_zeros(x.shape[0] - int(offsets[-1]), parts[0].shape[1])])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scheme=schemes(),
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 3, 9, 17]), min_size=1, max_size=5),
    outside=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    out_features=st.integers(1, 40),
    in_features=SIZES,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    int8=st.booleans(),
    biased=st.booleans(),
)
def test_bits_of_one_call_an_expert(tier, scheme, counts, outside, out_features, in_features, dtype, int8, biased):
    bits, group, asymmetric = scheme
    stored, weights = stack(len(counts), bits, group, asymmetric, out_features, in_features)
    offsets = outside[0] + torch.tensor([0, *counts]).cumsum(0)
    x = torch.randn(int(offsets[-1]) + outside[1], in_features).to(dtype)
    bias = torch.randn(len(counts), out_features).to(dtype) if biased else None
    scheme = bias, bits, group, int8
    assert torch.equal(together(tier, x, offsets, stored, *scheme), one_by_one(tier, x, offsets, weights, *scheme))


@pytest.mark.parametrize("rows", [1, 24], ids=["shared-out", "many-rows"])
@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_bits_do_not_depend_on_threads(tier, rows, int8):
    (stored, _), before = stack(5, 4, 64, True, 517, 1024), torch.get_num_threads()
    offsets = torch.arange(6) * rows
    x, results = torch.randn(5 * rows, 1024), []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(together(tier, x, offsets, stored, None, 4, 64, int8))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("offsets", [[0, 3, 2], [-1, 1, 4], [0, 1, 9], [0, 4]], ids=str)
def test_bad_offsets_are_refused(tier, offsets):
    stored, _ = stack(2, 4, 32, True, 8, 64)
    with pytest.raises(ValueError, match="offsets"):
        together(tier, torch.randn(4, 64), torch.tensor(offsets), stored, None, 4, 32, True)
