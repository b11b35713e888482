"""The counter-based noise: a function of seed, step, name, row and column; uniform; unrelated where one of them
differs."""

import math

import pytest
import torch

from hf_lowbit.functional.noise import column_words, key_of, more_words, row_words, uniform, words


ROWS, COLUMNS = 512, 1024
COUNT = ROWS * COLUMNS
# standard errors that a sum over independent uniforms exceeds once in ten million draws
SIGMAS = 5.3


def draw(seed=0, step=1, name="model.layers.0.mlp.up_proj.weight", rows=(0, ROWS), columns=COLUMNS):
    key = key_of(seed, step, name)
    return words(row_words(key, *rows), column_words(key, columns))


def correlation(a, b):
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).mean() / (a.std() * b.std()))


def test_the_same_arguments_give_the_same_words():
    assert torch.equal(draw(), draw())


def test_golden_words():
    """Kernels in other languages are written against these."""
    assert key_of(0, 1, "w") == (-1441069908, 1566025072)
    assert draw(name="w", rows=(0, 2), columns=3).tolist() == [
        [-1952462132, -900687532, 728627502],
        [-894706691, -90820175, -1808731658],
    ]


def test_rows_of_a_shard_are_rows_of_the_whole():
    assert torch.equal(draw(rows=(100, 200)), draw()[100:200])


def test_a_narrower_tensor_draws_the_same_columns():
    assert torch.equal(draw(columns=100), draw()[:, :100])


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"step": 2}, {"name": "model.layers.1.mlp.up_proj.weight"}, {"seed": -1}],
    ids=["seed", "step", "name", "negative-seed"],
)
def test_another_seed_step_or_name_is_unrelated(other):
    a, b = draw(), draw(**other)
    assert not torch.equal(a, b)
    assert abs(correlation(uniform(a), uniform(b))) < SIGMAS / math.sqrt(COUNT)


def test_moments_of_the_uniform():
    u = uniform(draw()).double()
    assert 0 <= u.min() and u.max() < 1
    for power in (1, 2, 3, 4):
        expected, variance = 1 / (power + 1), 1 / (2 * power + 1) - 1 / (power + 1) ** 2
        assert abs(float((u**power).mean()) - expected) < SIGMAS * math.sqrt(variance / COUNT)


def test_every_bit_is_fair():
    x = draw()
    for bit in range(32):
        ones = float(((x >> bit) & 1).double().mean())
        assert abs(ones - 0.5) < SIGMAS * 0.5 / math.sqrt(COUNT), bit


def test_cells_are_filled_evenly():
    """Chi-squared over 256 cells: mean 255, standard deviation 22.6."""
    counts = torch.bincount((uniform(draw()) * 256).long().clamp(max=255).flatten(), minlength=256).double()
    statistic = float(((counts - COUNT / 256) ** 2).sum() / (COUNT / 256))
    assert abs(statistic - 255) < SIGMAS * math.sqrt(2 * 255)


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (0, 2), (0, 16), (16, 0), (0, 256), (7, 13)], ids=str)
def test_neighbours_are_unrelated(shift):
    u, (down, right) = uniform(draw()), shift
    a, b = u[down:, right:], u[: ROWS - down, : COLUMNS - right]
    assert abs(correlation(a, b)) < SIGMAS / math.sqrt(a.numel())
    # of products of thirds too: a pair could depend on each other without being correlated
    joint = torch.bincount(((a * 3).long().clamp(max=2) * 3 + (b * 3).long().clamp(max=2)).flatten(), minlength=9)
    statistic = float(((joint.double() - a.numel() / 9) ** 2).sum() / (a.numel() / 9))
    assert statistic < 8 + SIGMAS * math.sqrt(2 * 8) + 10


def test_successive_steps_of_one_element_are_unrelated():
    key = [key_of(0, step, "w") for step in range(4000)]
    u = torch.stack([uniform(words(row_words(k, 3, 5), column_words(k, 4))) for k in key]).flatten(1)
    assert (u.mean(0) - 0.5).abs().max() < SIGMAS * math.sqrt(1 / 12 / len(key))
    for lag in (1, 2, 7):
        for element in range(u.shape[1]):
            assert abs(correlation(u[lag:, element], u[:-lag, element])) < SIGMAS / math.sqrt(len(key) - lag)


def test_second_words_are_uniform_and_unrelated_to_the_first():
    x = draw()
    kept = x.clone()
    y = more_words(x)
    assert torch.equal(x, kept)
    assert abs(correlation(uniform(x), uniform(y))) < SIGMAS / math.sqrt(COUNT)
    # the low bits are what rounds the states
    low = (y & 0xFFFFF).double() / 2**20
    assert abs(float(low.mean()) - 0.5) < SIGMAS * math.sqrt(1 / 12 / COUNT)
    assert abs(correlation(uniform(x), low)) < SIGMAS / math.sqrt(COUNT)


def test_small_probabilities_are_resolved():
    """u < p has probability p far below 2^-24: the smallest values are exact."""
    smallest = uniform(torch.tensor([0, 1, 2, 3], dtype=torch.int32)).tolist()
    assert smallest[0] == 0
    assert smallest[1:] == pytest.approx([2**-31, 2**-30, 3 * 2**-31], rel=2**-23)


def test_the_largest_word_stays_below_one():
    assert uniform(torch.tensor([-1, 2**31 - 1], dtype=torch.int32)).tolist() == [1 - 2**-24] * 2


def test_torch_generators_are_left_alone():
    before = torch.get_rng_state()
    draw()
    assert torch.equal(before, torch.get_rng_state())
