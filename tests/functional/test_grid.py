"""Grids and dequantization against the formula of docs/format.md, written again in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_lowbit.functional.grid import BITS, dequantize, expand_groups, grid_of, group_count


@pytest.mark.parametrize(
    ("bits", "field_bits", "qmin", "qmax"),
    [
        pytest.param("ternary", 2, -1, 1, id="ternary"),
        pytest.param(2, 2, -2, 1, id="two"),
        pytest.param(3, 3, -4, 3, id="three"),
        pytest.param(4, 4, -8, 7, id="four"),
        pytest.param(8, 8, -128, 127, id="eight"),
    ],
)
def test_the_grids_of_the_format(bits, field_bits, qmin, qmax):
    grid = grid_of(bits)
    assert (grid.bits, grid.field_bits, grid.qmin, grid.qmax) == (bits, field_bits, qmin, qmax)
    assert grid.levels == qmax - qmin
    assert bits in BITS


@pytest.mark.parametrize("bits", [0, 1, 5, 16, True, "binary", None, 4.5])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match=r'use "ternary", 2, 3, 4 or 8'):
        grid_of(bits)


@pytest.mark.parametrize(
    ("in_features", "group_size", "groups"),
    [
        pytest.param(8, None, 1, id="channel"),
        pytest.param(8, 4, 2, id="divides"),
        pytest.param(9, 4, 3, id="short-last-group"),
        pytest.param(3, 4, 1, id="one-short-group"),
        pytest.param(0, 4, 0, id="empty"),
    ],
)
def test_group_count(in_features, group_size, groups):
    assert group_count(in_features, group_size) == groups


def test_expand_groups_repeats_each_value_over_its_group():
    values = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert expand_groups(values, 7, 3).tolist() == [[1, 1, 1, 2, 2, 2, 3], [4, 4, 4, 5, 5, 5, 6]]
    assert expand_groups(values[:, :1], 7, None).tolist() == [[1], [4]]


@st.composite
def cases(draw):
    """codes [E?, N, K], scale, zero point or None, group size."""
    experts = draw(st.sampled_from([(), (2,)]))
    rows, width = draw(st.integers(0, 4)), draw(st.integers(1, 9))
    group_size = draw(st.one_of(st.none(), st.just("tensor"), st.integers(1, 12)))
    grid = grid_of(draw(st.sampled_from(BITS)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    groups = 1 if not isinstance(group_size, int) else group_count(width, group_size)
    shape = (*experts, 1 if group_size == "tensor" else rows, groups)

    def codes(size):
        return torch.randint(grid.qmin, grid.qmax + 1, size, dtype=torch.int8, generator=generator)

    scale = torch.rand(shape, generator=generator) + 0.01
    if isinstance(group_size, int):
        scale = scale.to(torch.bfloat16)
    zero_point = codes(shape) if draw(st.booleans()) else None
    return codes((*experts, rows, width)), scale, zero_point, group_size


@given(cases(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
def test_dequantize_is_the_formula(case, dtype):
    codes, scale, zero_point, group_size = case
    before = [None if t is None else t.clone() for t in case[:3]]
    result = dequantize(codes, scale, zero_point, group_size if isinstance(group_size, int) else None, dtype)

    width = codes.shape[-1]
    group_of = np.arange(width) // group_size if isinstance(group_size, int) else np.zeros(width, dtype=int)
    s = scale.float().numpy()[..., group_of]
    z = 0 if zero_point is None else zero_point.numpy().astype(np.int32)[..., group_of]
    expected = s * (codes.numpy().astype(np.int32) - z).astype(np.float32)
    assert result.dtype == dtype
    assert torch.equal(result, torch.from_numpy(np.broadcast_to(expected, codes.shape).copy()).to(dtype))
    assert all(a is b or torch.equal(a, b) for a, b in zip(before, case[:3], strict=True))
