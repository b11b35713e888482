"""The candidates for the clip search's measure: today's is the package's own, and each does what its name says."""

import math
import time

import pytest
import torch

from benchmarks import clip
from benchmarks.record import Record
from hf_lowbit.functional import rounding
from hf_lowbit.functional.grid import dequantize, grid_of


# the scale of a channel is float32; its codes are rounded again with it, which moves a few
CODES_MOVED = 0.02


@pytest.fixture
def weight():
    return torch.randn(16, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group_size", [64, None], ids=["groups", "channel"])
def test_one_rule_is_the_search_of_the_package(weight, bits, group_size):
    q = rounding.round_to_nearest(weight, grid_of(bits), group_size, symmetric=bits >= 4)
    assert torch.allclose(clip.rounded(weight, bits, group_size, clip.DEFAULT), dequantize(*q, group_size), atol=1e-5)


def test_cover_is_no_search(weight):
    q = rounding.round_to_nearest(weight, grid_of(4), 64, symmetric=True, search=False)
    assert torch.equal(clip.rounded(weight, 4, 64, "cover"), dequantize(*q, 64))


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        pytest.param("power0", lambda w, lost: lost**2, id="power0"),
        pytest.param("power0.5", lambda w, lost: w.abs() ** 0.5 * lost**2, id="power0.5"),
        pytest.param("mean", lambda w, lost: (w.abs() + w.abs().mean(1, keepdim=True)) * lost**2, id="mean"),
        pytest.param("norm4", lambda w, lost: lost**4, id="norm4"),
    ],
)
def test_a_rule_has_less_of_its_own_error_than_the_others(weight, rule, error):
    # per channel: one group a row, float32 scales
    totals = {name: float(error(weight, clip.rounded(weight, 3, None, name) - weight).sum()) for name in clip.RULES}
    assert totals[rule] <= (1 + CODES_MOVED) * min(totals.values())
    assert totals[rule] < totals["cover"]


def test_unbiased_keeps_more_of_the_length_along_the_weight(weight):
    kept = (weight * clip.rounded(weight, 3, None, "unbiased")).sum(1) / weight.square().sum(1)
    shrunk = (weight * clip.rounded(weight, 3, None, "power0")).sum(1) / weight.square().sum(1)
    assert shrunk.mean() < kept.mean() < 1 + CODES_MOVED


def test_the_search_of_the_package_is_put_back():
    kept = rounding._Best
    with pytest.raises(ZeroDivisionError), clip.measured_by("power0"):
        assert rounding._Best is not kept
        raise ZeroDivisionError
    assert rounding._Best is kept


def test_rows_are_measured_once_and_before_the_deadline(albert, monkeypatch, tmp_path):
    monkeypatch.setattr(clip, "MODELS", ("albert",))
    monkeypatch.setattr(clip, "POINTS", ((4, 64), (2, 64)))
    record = Record("clip", {}, folder=tmp_path)
    clip.sweep(record, "", ["power1", "cover"], deadline=time.monotonic() - 1)
    assert record.rows == {}
    clip.sweep(record, "", ["power1", "cover"], deadline=math.inf)
    assert len(record.rows) == 4
    assert record.rows["albert/4/g64/power1"]["loss"] < record.rows["albert/2/g64/power1"]["loss"]
    monkeypatch.setattr(clip, "Albert", None)
    clip.sweep(record, "", ["power1", "cover"], deadline=math.inf)
    assert clip.table(record.rows).count("\n") == 3
