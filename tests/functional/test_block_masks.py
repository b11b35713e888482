"""Scores, masks and prune-and-grow on blocks, against plain loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_lowbit.functional.block_masks import (
    best_blocks,
    block_scores,
    clear_dead,
    clear_dead_,
    columns_of,
    is_clear,
    live_mask,
    mask_of,
    prune_and_grow,
)


SHAPES = [((32, 48), (8, 16)), ((30, 50), (8, 16)), ((8, 8), (8, 8)), ((9, 17), (8, 16))]


def slices(shape, block):
    for i in range(0, shape[0], block[0]):
        for j in range(0, shape[1], block[1]):
            yield (i // block[0], j // block[1]), (slice(i, i + block[0]), slice(j, j + block[1]))


@pytest.mark.parametrize(("shape", "block"), SHAPES)
@pytest.mark.parametrize("score", ["fro", "l1", "act"])
def test_scores(shape, block, score, device):
    weight, squares = torch.randn(shape, device=device), torch.rand(shape[1], device=device)
    scores = block_scores(weight, block, score, squares)
    for index, part in slices(shape, block):
        values = weight[part]
        wanted = {"fro": values.square().sum().sqrt(), "l1": values.abs().sum(),
                  "act": (values.square() * squares[part[1]]).sum()}[score]  # fmt: skip
        torch.testing.assert_close(scores[index], wanted)


def test_activation_score_needs_activations():
    with pytest.raises(ValueError, match="mean squares"):
        block_scores(torch.ones(8, 8), (8, 8), "act")


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_rows_keep_the_same_number(rows, columns, data):
    # few values: ties are the rule
    scores = torch.tensor(data.draw(st.lists(st.lists(st.integers(0, 2), min_size=columns, max_size=columns),
                                             min_size=rows, max_size=rows))).float()  # fmt: skip
    count = data.draw(st.integers(0, columns))
    mask = best_blocks(scores, count, "row")
    assert mask.sum(1).tolist() == [count] * rows
    for row, kept in zip(scores, mask, strict=True):
        assert kept.all() or not kept.any() or row[kept].min() >= row[~kept].max()
    assert int(best_blocks(scores, count * rows, "none").sum()) == count * rows


def test_equal_scores_are_decided_by_position():
    assert best_blocks(torch.zeros(2, 5), 2, "row").tolist() == [[True, True, False, False, False]] * 2


@pytest.mark.parametrize("balance", ["row", "none"])
def test_budget_growth_keeps_the_count_and_takes_the_best_gradients(balance):
    torch.manual_seed(0)
    weights, gradients = torch.rand(4, 10), torch.rand(4, 10)
    count = 5 if balance == "row" else 20
    mask = prune_and_grow(weights, gradients, count, "budget", 0.4, balance)
    grown = 2 if balance == "row" else 8
    kept = best_blocks(weights, count - grown, balance)
    assert int(mask.sum()) == 20 and (mask | ~kept).all()
    others, chosen = (gradients[~kept & ~mask], gradients[mask & ~kept])
    if balance == "none":
        assert chosen.min() >= others.max()
    else:
        assert mask.sum(1).tolist() == [5] * 4


def test_union_growth_adds_blocks():
    weights, gradients = torch.tensor([[4.0, 3, 2, 1]]), torch.tensor([[1.0, 2, 3, 4]])
    assert prune_and_grow(weights, gradients, 2, "union", 0.0, "row").all()
    assert int(prune_and_grow(weights, weights, 2, "union", 0.0, "row").sum()) == 2


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_gradients_that_are_no_numbers_grow_nothing(bad):
    weights = torch.rand(3, 6)
    gradients = None if bad is None else torch.full((3, 6), bad)
    mask = prune_and_grow(weights, gradients, 2, "budget", 0.5, "row")
    assert torch.equal(mask, best_blocks(weights, 2, "row"))


@pytest.mark.parametrize(("shape", "block"), SHAPES)
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_dead_blocks_become_exact_zeros(shape, block, transposed, device):
    mask = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1]), device=device) < 0.5
    weight = torch.randn(shape[::-1], device=device).t() if transposed else torch.randn(shape, device=device)
    weight[0, 0] = float("nan") if not mask[0, 0] else 1.0
    weight[-1, -1] = -0.0 if not mask[-1, -1] else 1.0
    before = weight.clone()
    cleared = clear_dead(weight, mask, block)
    assert torch.equal(weight.nan_to_num(7.0), before.nan_to_num(7.0))
    clear_dead_(weight, mask, block)
    assert torch.equal(weight, cleared) and is_clear(weight, mask, block)
    for index, part in slices(shape, block):
        if mask[index]:
            assert torch.equal(weight[part], before[part])
        else:
            # not -0.0 either
            assert (weight[part] == 0).all() and not torch.signbit(weight[part]).any()


def test_negative_zeros_are_dead():
    weight = torch.zeros(16, 16)
    weight[:8] = -0.0
    weight[8:, 8:] = 1e-38
    assert live_mask(weight, (8, 8)).tolist() == [[False, False], [False, True]]


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5))
def test_columns_and_back(rows):
    mask = torch.tensor(rows)
    columns, pointers = columns_of(mask)
    assert columns.dtype == torch.int32
    assert (pointers is None) == (len({sum(row) for row in rows}) == 1)
    assert torch.equal(mask_of(columns, pointers, tuple(mask.shape)), mask)
