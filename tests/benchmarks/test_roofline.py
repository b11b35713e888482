"""Intensities are counted as the equations say, bounds are the lower roof, and every layer is a product."""

import pytest
import torch

from benchmarks import linear, roofline
from benchmarks.record import Record
from benchmarks.roofline_layers import NAMES, Work, layer, work


SHAPE = (128, 256)
COMPUTE = {"fp32": 4e10, "bf16": 2e11, "int8": 4e11}


def test_work_is_counted():
    asked = work(SHAPE, 3, 1000, 0.5, torch.bfloat16, "bf16")
    assert asked.operations == 2 * 3 * 128 * 256 / 2 and asked.data_bytes == 3 * (128 + 256) * 2
    assert asked.intensity == pytest.approx(98304 / (1000 + 2304))


def test_two_bits_have_eight_times_the_intensity_of_bfloat16():
    """As the acceptance check of facts has it: bytes of weights are all that counts at one row of a large matrix."""
    found = {}
    for name in ("dense bf16", "ternary float", "int4 g64 float", "int8 float"):
        _, size, live, dtype, word = layer(name, (2048, 2048), 1)
        found[name] = work((2048, 2048), 1, size, live, dtype, word).intensity
    assert found["ternary float"] / found["dense bf16"] == pytest.approx(8, rel=0.01)
    # a bfloat16 scale for 64 weights
    assert found["int4 g64 float"] / found["dense bf16"] == pytest.approx(16 / 4.25, rel=0.01)
    assert found["int8 float"] / found["dense bf16"] == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(
    ("operations", "word", "bound", "ceiling"),
    [(1e4, "bf16", 1e11, "memory"), (1e6, "bf16", 2e11, "compute"), (1e6, "int8", 4e11, "compute")],
    ids=["below-the-ridge", "above", "int8-roof"],
)
def test_the_lower_roof_holds(operations, word, bound, ceiling):
    assert Work(operations, 800, 200, word).bound(COMPUTE, 1e10) == (pytest.approx(bound), ceiling)


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_products(name):
    function, size, live, dtype, word = layer(name, SHAPE, 2)
    assert function(torch.randn(3, 256).to(dtype), 1).shape == (3, 128)
    assert 0 < size <= 128 * 256 * 4 and 0 < live <= 1 and word in COMPUTE


def test_ceilings_are_positive():
    found = roofline.compute_ceilings(64)
    assert set(found) == {"fp32", "bf16", "int8"} and min(found.values()) > 0
    assert roofline.triad_bandwidth(1e6) > 0 and roofline.file_bandwidth(1e6) > 0


@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "busy"])
def test_only_a_quiet_machine_is_recorded(monkeypatch, tmp_path, capsys, quiet):
    monkeypatch.setattr(linear, "BUDGET", 0.0)
    names = ("dense fp32", "int4 g64 int8", "block-sparse 90% b64 bf16")
    monkeypatch.setattr(roofline, "NAMES", names)
    monkeypatch.setattr(roofline, "SHAPE", SHAPE)
    monkeypatch.setattr(roofline, "ROWS", (1, 4))
    monkeypatch.setattr(roofline, "RING_WEIGHTS", 1e5)
    monkeypatch.setattr(roofline, "CEILINGS", {
        "compute": lambda: dict(COMPUTE), "triad": lambda: 1e10, "stream": lambda: 5e9, "file": lambda: 1e9,
        "all-reduce": lambda: 1e8,
    })  # fmt: skip
    monkeypatch.setattr(roofline, "is_quiet", lambda others: quiet)
    records = []

    def record(name, protocol, restart):
        records.append(Record(name, protocol, restart, folder=tmp_path))
        return records[0]

    monkeypatch.setattr(roofline, "Record", record)
    roofline.main(type("Arguments", (), {"restart": False}))
    rows, printed = records[0].rows, capsys.readouterr().out
    assert bool(rows) == quiet
    if not quiet:
        assert "ceilings are missing" in printed
        return
    assert set(rows) == {*names, *roofline.CEILINGS}
    found = roofline.attained(rows)
    assert len(found) == 2 * len(names)
    for _, _, figures, bound, ceiling, share in found:
        assert ceiling in ("compute", "memory") and share > 0
        assert share * bound == pytest.approx(figures["operations"] / figures["seconds"])
    assert "all-reduce: 0.10 GB/s" in printed


@pytest.mark.slow
def test_gloo_bandwidth():
    assert roofline.network_bandwidth(1 << 16) > 0
