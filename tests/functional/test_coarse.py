"""The ternary form of finer codes is BitNet's absmean rule on the numbers that the codes stand for."""

import pytest
import torch

from hf_lowbit.functional.coarse import sum_groups, ternary
from hf_lowbit.functional.grid import dequantize, grid_of
from hf_lowbit.functional.rounding import round_to_nearest


GROUPS = [None, 16, 24, 100, "tensor"]


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group_size", GROUPS, ids=str)
def test_equals_absmean_of_the_dequantized_weight(bits, group_size):
    torch.manual_seed(0)
    q = round_to_nearest(torch.randn(12, 64), grid_of(bits), group_size, symmetric=True)
    block = group_size if isinstance(group_size, int) else None
    found = ternary(q.codes, q.scale, block)
    dense = dequantize(q.codes, q.scale, None, block)
    expected = round_to_nearest(dense, grid_of("ternary"), group_size, symmetric=True)
    assert found.scale.dtype == q.scale.dtype
    assert torch.allclose(found.scale.float(), expected.scale.float(), rtol=1e-2 if block else 1e-5)
    # a value half-way between two levels may fall to either side
    assert (found.codes == expected.codes).float().mean() > 0.995


@pytest.mark.parametrize("group_size", [None, 8], ids=str)
def test_a_group_of_zeros_stays_zero(group_size):
    codes = torch.zeros(2, 16, dtype=torch.int8)
    codes[1, 3] = 5
    scale = torch.full((2, 2 if group_size else 1), 0.5)
    found = ternary(codes, scale, group_size)
    assert not found.codes[0].any() and torch.isfinite(found.scale).all() and (found.scale > 0).all()


def test_arguments_are_left_alone():
    codes, scale = torch.randint(-7, 8, (4, 8), dtype=torch.int8), torch.rand(4, 1)
    kept = codes.clone(), scale.clone()
    ternary(codes, scale, None)
    assert torch.equal(codes, kept[0]) and torch.equal(scale, kept[1])


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (4, 3)], ids=["tensor", "rows", "groups"])
def test_sums_over_what_shares_a_scale(shape):
    values = torch.arange(4.0 * 10).reshape(4, 10)
    group_size = 4 if shape[1] > 1 else None
    total = sum_groups(values, torch.Size(shape), group_size)
    assert total.shape == shape and total.sum() == values.sum()
