"""Rows of a packed weight by the C library: the bits of the definition, on every tier, for any number of threads."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.functional.rows import Rows, choose_rows, rows_of
from tests.kernels.weights import SIZES, make_weight, schemes


# groups of products are multiples of 32; rows as numbers take any
ANY_GROUP = st.sampled_from([1, 3, 8, 20, 33])


def rows(kernel, weight, ids, bits, in_features, group, dtype):
    with use_kernel(kernel):
        return rows_of(*weight, ids, bits, in_features, group if isinstance(group, int) else None, dtype)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scheme=schemes(),
    odd_group=st.one_of(st.none(), ANY_GROUP),
    out_features=st.integers(1, 20),
    in_features=SIZES,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    ids_dtype=st.sampled_from([None, torch.int64, torch.int32]),
    seed=st.integers(0, 9),
)
def test_bits_of_the_definition(tier, scheme, odd_group, out_features, in_features, dtype, ids_dtype, seed):
    bits, group, asymmetric = scheme
    group = odd_group or group
    weight = make_weight(bits, group, asymmetric, out_features, in_features, seed)
    ids = None
    if ids_dtype is not None:
        ids = torch.randint(0, out_features, (7,), dtype=ids_dtype, generator=torch.Generator().manual_seed(seed))
    arguments = weight, ids, bits, in_features, group, dtype
    assert torch.equal(rows(tier, *arguments), rows("reference", *arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_and_tiny_numbers_round_as_in_torch(tier, dtype):
    """Overflow to infinity, subnormals and ties: scales over the whole range of float32."""
    packed, _, _ = make_weight(8, None, False, 240, 256)
    scale = (2.0 ** torch.arange(-140, 100, dtype=torch.float64)).to(torch.float32).view(-1, 1) * 1.0078125
    arguments = (packed, scale, None), None, 8, 256, None, dtype
    assert torch.equal(rows(tier, *arguments), rows("reference", *arguments))


def test_bits_do_not_depend_on_threads(tier):
    weight, before = make_weight(3, 64, True, 301, 1056), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(rows(tier, weight, None, 3, 1056, 64, torch.bfloat16))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("bad", [-1, 12, 2**40])
def test_ids_outside_are_refused_before_anything_is_read(tier, bad):
    weight = make_weight(4, 32, False, 12, 64)
    with pytest.raises(IndexError, match="index out of range"):
        rows(tier, weight, torch.tensor([3, bad]), 4, 64, 32, torch.float32)


def test_nothing_to_do(tier):
    weight = make_weight(4, 32, False, 12, 64)
    assert rows(tier, weight, torch.zeros(0, dtype=torch.int64), 4, 64, 32, torch.float32).shape == (0, 64)


def test_what_is_not_in_c_is_left_to_torch():
    call = Rows(4, 32, False, False, 12, 64, torch.bfloat16, None, torch.float32, "cpu")
    for other in (
        {"dtype": torch.float64},
        {"scale_dtype": torch.float64},
        {"ids_dtype": torch.int16},
        {"device": "meta"},
    ):
        assert choose_rows(call._replace(**other)).name == "reference"
