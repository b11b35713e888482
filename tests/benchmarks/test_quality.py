"""The quality sweep on tiny models: complete rows, stops at its deadline, continues where it stopped."""

import math
import time

import pytest

from benchmarks import quality
from benchmarks.quality import LanguageModel, Point, sweep, sweep_shuffles
from benchmarks.record import Record


@pytest.fixture
def small_grid(monkeypatch):
    monkeypatch.setattr(quality, "BITS", (8, 2))
    monkeypatch.setattr(quality, "GROUPS", (32, None))


@pytest.fixture
def subject(tiny_llama):
    return LanguageModel(tiny_llama, count=2, length=32)


def test_rows_are_complete_and_plausible(small_grid, subject, tmp_path):
    record = Record("quality", {}, folder=tmp_path)
    sweep(subject, record, deadline=math.inf)
    assert len(record.rows) == 1 + 2 * 2 * 2
    dense, eight, two = (record.rows[f"smollm2/{key}"] for key in ("dense", "8/g32/rtn", "2/channel/rtn"))
    assert two["bytes"] < eight["bytes"] < dense["bytes"]
    # 8 bits and a bfloat16 scale for 32 weights
    assert eight["bits_per_weight"] == pytest.approx(8.5)
    assert abs(eight["nll_difference"][0]) < abs(two["nll_difference"][0])
    assert "bytes" not in record.rows["smollm2/8/g32/absmax"]


def test_nothing_is_measured_after_the_deadline_or_twice(small_grid, subject, tmp_path, monkeypatch):
    record = Record("quality", {}, folder=tmp_path)
    sweep(subject, record, deadline=time.monotonic() - 1)
    assert record.rows == {}
    sweep(subject, Record("quality", {}, folder=tmp_path), deadline=math.inf)
    monkeypatch.setattr(LanguageModel, "measure", lambda *_: pytest.fail("measured again"))
    finished = Record("quality", {}, folder=tmp_path)
    sweep(subject, finished, deadline=math.inf)
    assert len(finished.rows) == 9


def test_other_shuffles_are_other_roundings_of_the_same_function(
    small_grid, subject, tiny_llama, tmp_path, monkeypatch
):
    monkeypatch.setattr(quality, "SHUFFLES", (1, 2))
    record = Record("quality", {}, folder=tmp_path)
    sweep(subject, record, deadline=math.inf)
    sweep_shuffles(subject, tiny_llama, record, deadline=math.inf)
    first, second = (record.rows[f"smollm2/4/g64/rtn/shuffle{seed}"]["perplexity"] for seed in (1, 2))
    assert first != second
    assert first == pytest.approx(second, rel=0.05)


def test_keys_tell_the_point():
    assert Point("minilm", "ternary", None, "absmax").key == "minilm/ternary/channel/absmax"
    assert Point("smollm2", 4, 64, "rtn").key == "smollm2/4/g64/rtn"
