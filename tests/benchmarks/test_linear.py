"""The benchmark of products: what it measures is what it says, and a busy machine leaves no figures."""

import pytest
import torch

from benchmarks import linear
from benchmarks.record import Record
from hf_lowbit.kernels.cpu import library


@pytest.fixture(autouse=True)
def small_and_without_gradients(monkeypatch):
    if library.load().handle is None:
        pytest.skip(library.load().reason)
    monkeypatch.setattr(linear, "BUDGET", 0.0)
    monkeypatch.setattr(linear, "ROWS", (1, 4))
    monkeypatch.setattr(linear, "stream_gb_per_s", lambda: 10.0)
    with torch.no_grad():
        yield


def test_every_candidate_is_a_product():
    functions = linear.candidates((32, 64), 2)
    assert set(functions) == {"bf16", "fp32", *linear.SCHEMES}
    for name, function in functions.items():
        assert function(torch.randn(3, 64).bfloat16(), 1).shape == (3, 32), name
    seconds = linear.medians(functions, torch.randn(1, 64).bfloat16())
    assert set(seconds) == set(functions) and min(seconds.values()) > 0


@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "busy"])
def test_only_a_quiet_machine_is_recorded(monkeypatch, tmp_path, quiet):
    monkeypatch.setattr(linear, "is_quiet", lambda others, stream: quiet)
    record = Record("linear", {}, folder=tmp_path)
    linear.measure(record, "cpu-portable", (32, 64), 4096)
    assert len(record.rows) == (2 if quiet else 0)
    for row in record.rows.values():
        assert row["products"]["bf16"]["ratio"] == 1.0
