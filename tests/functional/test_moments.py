"""Low-bit optimizer states: unbiased inside their range, zero stays zero, second moments never become zero."""

import math

import pytest
import torch

from hf_lowbit.functional.moments import BLOCK, LAYOUT, blocks_of, decode, encode, to_bfloat16
from hf_lowbit.functional.noise import column_words, key_of, row_words, words


SIGMAS = 5.3
KINDS = [pytest.param(bits, signed, id=f"{bits}-{'signed' if signed else 'positive'}") for bits, signed in LAYOUT]
# octaves that a layout covers, of which the lowest is kept clear here
OCTAVES = {(8, True): 14, (8, False): 30, (4, True): 5, (4, False): 13}


def noise(rows, columns, step=1):
    key = key_of(0, step, "state")
    return words(row_words(key, 0, rows), column_words(key, columns))


def values(bits, signed, rows=4, columns=300):
    generator = torch.Generator().manual_seed(0)
    exponent = -OCTAVES[bits, signed] * torch.rand(rows, columns, generator=generator)
    x = torch.exp2(exponent) * 1e-3
    return x * torch.randn(rows, columns, generator=generator).sign() if signed else x


@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_mean_over_noise_is_the_value(bits, signed):
    x, draws = values(bits, signed), 3000
    total = torch.zeros(x.shape, dtype=torch.float64)
    square = torch.zeros_like(total)
    for step in range(draws):
        back = decode(*encode(x, noise(*x.shape, step), bits, signed), bits, signed, x.shape[1]).double()
        total += back
        square += (back - x) ** 2
    spread = (square / draws).sqrt() + 1e-7 * x.abs()
    # where a value lies next to a level, the other neighbour turns up a few times only
    rare = 20 * {8: 0.125, 4: 1.0}[bits] * x.abs() / draws
    assert ((total / draws - x).abs() < SIGMAS * spread / math.sqrt(draws) + rare).all()


@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_result_is_a_neighbour(bits, signed):
    x = values(bits, signed)
    back = decode(*encode(x, noise(*x.shape), bits, signed), bits, signed, x.shape[1])
    relative = {8: 0.125, 4: 1.0}[bits]
    assert ((back - x).abs() <= relative * x.abs() * 1.0001).all()


@pytest.mark.parametrize(("bits", "signed"), KINDS)
@pytest.mark.parametrize("columns", [1, 2, 127, 128, 129, 255, 256, 257, 576, 1000])
def test_any_width(bits, signed, columns):
    x = values(bits, signed, 3, columns)
    codes, base = encode(x, noise(*x.shape), bits, signed)
    assert codes.dtype == torch.uint8 and base.dtype == torch.int16
    assert codes.shape == (3, columns if bits == 8 else -(-columns // 2))
    assert base.shape == (3, blocks_of(columns, bits).count)
    back = decode(codes, base, bits, signed, columns)
    assert back.shape == x.shape and (back * x >= 0).all()
    relative = {8: 0.125, 4: 1.0}[bits]
    assert ((back - x).abs() <= relative * x.abs() * 1.0001).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_zero_stays_zero_beside_large_values(bits):
    x = torch.zeros(2, 64)
    x[0, 3] = 1e3
    back = decode(*encode(x, noise(2, 64), bits, True), bits, True, 64)
    assert back[0, 3] != 0
    assert torch.count_nonzero(back) == 1


@pytest.mark.parametrize("bits", [8, 4])
def test_second_moments_never_vanish(bits):
    x = torch.full((1, 64), 1e-30)
    x[0, 0] = 1.0
    back = decode(*encode(x, noise(1, 64), bits, False), bits, False, 64)
    assert (back > 0).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-45, 1e37])
def test_extreme_blocks_are_finite(bits, size):
    x = torch.full((1, 8), size)
    for signed in (True, False):
        assert torch.isfinite(decode(*encode(x, noise(1, 8), bits, signed), bits, signed, 8)).all()


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_slow_average_keeps_moving(bits):
    """beta2 = 0.999: rounding to nearest would never leave the start."""
    rows, columns, target = 8, 256, 1.0
    v = torch.full((rows, columns), 0.25)
    for step in range(3000):
        v = v * 0.999 + 0.001 * target
        word = noise(rows, columns, step)
        if bits == 16:
            v = to_bfloat16(v, word).float()
        else:
            v = decode(*encode(v, word, bits, False), bits, False, columns)
    expected = target - (target - 0.25) * 0.999**3000
    assert float(v.mean()) == pytest.approx(expected, rel=0.05)
    nearest = torch.tensor(0.25, dtype=torch.bfloat16)
    assert (nearest.float() * 0.999 + 0.001 * 0.26).to(torch.bfloat16) == nearest


def test_bfloat16_is_unbiased_and_keeps_infinity():
    x = torch.full((1, 100_000), 1.001953125 + 0.00390625 / 3)
    back = to_bfloat16(x, noise(1, 100_000)).double()
    assert abs(float(back.mean()) - float(x[0, 0])) < SIGMAS * float(back.std()) / math.sqrt(100_000)
    special = torch.tensor([[math.inf, -math.inf, 0.0]])
    assert torch.equal(to_bfloat16(special, noise(1, 3)).float(), special)
    assert to_bfloat16(torch.tensor([[math.nan]]), noise(1, 1)).isnan().all()


@pytest.mark.parametrize("columns", [1, 100, 256, 257, 576, 1536])
@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_cover_a_row(columns, bits):
    count, width, padding = blocks_of(columns, bits)
    assert count * width - padding == columns
    assert width <= BLOCK[bits] and 0 <= padding < count
