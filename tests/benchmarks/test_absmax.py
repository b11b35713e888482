"""The plain reference: few values, extremes exact, short last groups right."""

import pytest
import torch

from benchmarks.absmax import absmax, apply


@pytest.mark.parametrize("bits", [8, 4, 3, 2, "ternary"])
def test_a_group_takes_few_values_and_keeps_its_extreme(bits):
    weight = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    rounded = absmax(weight, bits, group_size=4)
    levels = 3 if bits == "ternary" else 2**bits - 1
    for before, after in zip(weight.split(4, dim=1), rounded.split(4, dim=1), strict=True):
        largest = before.abs().amax(1, keepdim=True)
        assert torch.allclose(after.abs().amax(1, keepdim=True), largest)
        codes = after / largest * (levels - 1) / 2
        assert torch.allclose(codes, codes.round(), atol=1e-4)
        assert (before - after).abs().max() <= largest.max() / (levels - 1) * 1.001


def test_zeros_stay_zeros():
    assert torch.equal(absmax(torch.zeros(2, 5), 4, None), torch.zeros(2, 5))


def test_only_the_named_modules_change():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    before = [layer.weight.clone() for layer in model]
    apply(model, ["1"], 2, None)
    assert torch.equal(model[0].weight, before[0])
    assert torch.equal(model[1].weight, absmax(before[1], 2, None))
