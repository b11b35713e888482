"""The benchmark of fused experts: its layers are real ones, and its candidates compute the same."""

import pytest
import torch

from benchmarks.experts import SCHEMES, dense_layer, loop, low_layer, measure


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_call_equals_the_loop(scheme):
    dense = dense_layer(4, 2, 64, 128)
    low = low_layer(dense, SCHEMES[scheme])
    index, weights = torch.tensor([[0, 3], [3, 1], [1, 0]]), torch.full((3, 2), 0.5, dtype=torch.bfloat16)
    with torch.no_grad():
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        assert torch.equal(low(x, index, weights), loop(low, x, index, weights))
        assert dense(x, index, weights).shape == (3, 64)


def test_a_measurement_has_its_figures():
    dense = dense_layer(4, 2, 64, 128)
    low = low_layer(dense, SCHEMES["int4"])
    candidates = {"one call": low, "loop": lambda *a: loop(low, *a), "dense": dense}
    with torch.no_grad():
        figures = measure(candidates, 3, 4, 2, 64, turns=1)
    assert set(figures) == {"one call ms", "loop ms", "dense ms", "times loop", "times dense"}
    assert all(figure > 0 for figure in figures.values())
