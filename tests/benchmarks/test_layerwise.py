"""The loop that lists are compared with does the same steps."""

import pytest
import torch

from benchmarks import layerwise, linear
from benchmarks.layerwise import DECAY, OPTIMIZERS, RATE, Loop, measure, weights_of


SHAPES = [(4, 6), (3, 5), (8, 2)]


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_the_loop_does_what_lists_do(kind):
    one, other = weights_of(SHAPES), weights_of(SHAPES)
    optimizer, loop = OPTIMIZERS[kind](one, lr=RATE, weight_decay=DECAY), Loop(kind, other)
    for _ in range(5):
        optimizer.step()
        loop.step()
    for found, right in zip(one, other, strict=True):
        assert torch.allclose(found, right, atol=1e-6)
    assert not torch.equal(one[0], weights_of(SHAPES)[0])


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_what_is_measured(kind, monkeypatch):
    monkeypatch.setattr(linear, "BUDGET", 0.0)
    found = measure(kind, SHAPES)
    assert found["ratio"] == pytest.approx(found["loop_ms"] / found["lists_ms"], rel=0.2)
    assert {len(shapes) >= 150 for shapes in layerwise.SIZES.values()} == {True}
