"""Packing: the inverse of unpacking on every shape, byte for byte what docs/format.md draws."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_lowbit.functional.grid import BITS, grid_of
from hf_lowbit.functional.packing import pack, row_bytes, unpack


# codes and the bytes of their row, worked out by hand from the diagram in docs/format.md
GOLDEN = [
    # u = 0 1 2 3 | 3
    pytest.param(2, [-2, -1, 0, 1, 1], "e4 03", id="two"),
    # u = 0 1 2 2 | 1 0
    pytest.param("ternary", [-1, 0, 1, 1, 0, -1], "a4 01", id="ternary"),
    # u = 0..7 3: planes of u mod 4 = 0123 | 0123 | 3, then of u div 4 = 00001111 | 0
    pytest.param(3, [-4, -3, -2, -1, 0, 1, 2, 3, -1], "e4 e4 03 f0 00", id="three"),
    # u = 0 15 | 8 7 | 11
    pytest.param(4, [-8, 7, 0, -1, 3], "f0 78 0b", id="four"),
    pytest.param(8, [-128, -1, 0, 1, 127], "80 ff 00 01 7f", id="eight"),
    pytest.param(2, [1], "03", id="two-of-one"),
    pytest.param(3, [3], "03 01", id="three-of-one"),
    pytest.param(4, [7], "0f", id="four-of-one"),
    pytest.param("ternary", [1], "02", id="ternary-of-one"),
]


@pytest.mark.parametrize(("bits", "codes", "stored"), GOLDEN)
def test_golden_bytes(bits, codes, stored, device):
    packed = pack(torch.tensor(codes, dtype=torch.int8, device=device), grid_of(bits))
    assert packed.dtype == torch.int8
    assert bytes(packed.view(torch.uint8).cpu().numpy()).hex(" ") == stored
    assert unpack(packed, grid_of(bits), len(codes)).tolist() == codes


def test_every_row_starts_on_a_byte():
    codes = torch.tensor([[1, 2, 3], [-1, -2, -3]], dtype=torch.int8)
    packed = pack(codes, grid_of(4))
    assert [bytes(row.view(torch.uint8).numpy()).hex(" ") for row in packed] == ["a9 0b", "67 05"]


@pytest.mark.parametrize("width", range(18))
def test_row_bytes_are_those_of_the_format(width):
    quarter, eighth, half = (width + 3) // 4, (width + 7) // 8, (width + 1) // 2
    expected = {"ternary": quarter, 2: quarter, 3: quarter + eighth, 4: half, 8: width}
    assert {bits: row_bytes(width, grid_of(bits)) for bits in BITS} == expected
    for bits in BITS:
        assert pack(torch.zeros(2, width, dtype=torch.int8), grid_of(bits)).shape == (2, expected[bits])


SHAPES = st.lists(st.integers(0, 4), max_size=3).flatmap(
    lambda leading: st.integers(0, 40).map(lambda width: (*leading, width))
)


@given(SHAPES, st.sampled_from(BITS), st.integers(0, 1000), st.booleans())
def test_unpack_is_the_inverse(shape, bits, seed, strided):
    grid = grid_of(bits)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(grid.qmin, grid.qmax + 1, shape, dtype=torch.int8, generator=generator)
    if strided and len(shape) > 1:
        codes = codes.transpose(-1, -2).contiguous().transpose(-1, -2)
    before = codes.clone()
    packed = pack(codes, grid)
    stored = packed.clone()
    assert packed.shape == (*shape[:-1], row_bytes(shape[-1], grid))
    assert torch.equal(unpack(packed, grid, shape[-1]), codes)
    assert torch.equal(codes, before) and torch.equal(packed, stored)


@given(st.sampled_from(["ternary", 2, 3, 4]), st.integers(1, 40), st.integers(0, 1000))
def test_unused_fields_are_zero_and_carry_no_meaning(bits, width, seed):
    grid = grid_of(bits)
    longest = torch.full((width,), grid.qmax, dtype=torch.int8)
    # the last byte of a plane holds the bits of its last codes and nothing else
    used = 4 * (width % 2 or 2) if bits == 4 else 2 * (width % 4 or 4)
    plane_end = row_bytes(width, grid) if bits == 4 else (width + 3) // 4
    packed = pack(longest, grid)
    assert int(packed.view(torch.uint8)[plane_end - 1]) >> used == 0
    noise = torch.Generator().manual_seed(seed)
    garbled = packed.view(torch.uint8).to(torch.int64)
    garbled[plane_end - 1] |= (int(torch.randint(256, (), generator=noise)) << used) & 255
    assert torch.equal(unpack(garbled.to(torch.uint8).view(torch.int8), grid, width), longest)


@pytest.mark.parametrize("bits", [2, 3, 4, "ternary"])
def test_results_are_new_memory(bits):
    codes = torch.zeros(3, 8, dtype=torch.int8)
    assert pack(codes, grid_of(bits)).data_ptr() != codes.data_ptr()


def test_eight_bits_are_copied_too():
    codes = torch.zeros(3, 8, dtype=torch.int8)
    packed = pack(codes, grid_of(8))
    packed += 1
    unpacked = unpack(packed, grid_of(8), 8)
    unpacked += 1
    assert codes.unique().tolist() == [0] and packed.unique().tolist() == [1]


@pytest.mark.parametrize(
    ("bits", "code"),
    [
        pytest.param("ternary", -2, id="ternary-low"),
        pytest.param("ternary", 2, id="ternary-high"),
        pytest.param(2, -3, id="two-low"),
        pytest.param(2, 2, id="two-high"),
        pytest.param(3, -5, id="three-low"),
        pytest.param(3, 4, id="three-high"),
        pytest.param(4, -9, id="four-low"),
        pytest.param(4, 8, id="four-high"),
    ],
)
def test_codes_outside_the_grid_are_refused(bits, code):
    with pytest.raises(ValueError, match=rf"span \[{min(code, 0)}, {max(code, 0)}\], outside .* of {bits} bits"):
        pack(torch.tensor([[0, code, 0]], dtype=torch.int8), grid_of(bits))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32])
def test_codes_of_another_dtype_are_refused(dtype):
    with pytest.raises(TypeError, match=f"`codes` must be int8, got {dtype}"):
        pack(torch.zeros(4, dtype=dtype), grid_of(4))


@pytest.mark.parametrize("bits", BITS)
def test_rows_of_another_length_are_refused(bits):
    packed = pack(torch.zeros(2, 8, dtype=torch.int8), grid_of(bits))
    with pytest.raises(ValueError, match=rf"Expected {row_bytes(40, grid_of(bits))} bytes a row for 40 codes"):
        unpack(packed, grid_of(bits), 40)
