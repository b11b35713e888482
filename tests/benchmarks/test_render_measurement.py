"""docs/measurement.md says what the results say; every table and plot is made of rows alone."""

import json
import math
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import plots, render_measurement
from benchmarks.record import RESULTS, ROOT
from benchmarks.render_measurement import TABLES, render, section
from benchmarks.roofline_layers import work
from benchmarks.svg import Series, axis, plot
from benchmarks.time_model import Constants, all_reduce, compute, step


CONDITIONS = {
    "machine": {"cpu": "x", "instruction_sets": ["avx2"]},
    "versions": {"torch": "2"},
    "sessions": [{"started": "2026-12-01 10:00", "threads": 1}],
}
TRUE = Constants(0.01, 0.002, 1e-4, 1e9, overlap=0.3, gradient_bytes=8e6)


def sweep(prefix=""):
    ends = {16: (100, 140, 120), 64: (128, 128, None), 256: (None,)}
    return {f"{prefix}bf16/lars/{batch}/3/seed{seed}": {"samples": end, "stopped": "", "quality": [[1, 9.0]]}
            for batch, found in ends.items() for seed, end in enumerate(found)}  # fmt: skip


def scaled():
    """What an exact machine would have measured."""
    job = {"kind": "steps", "method": "fp32", "samples": 8, "world": 2, "bucket_mb": 25, "hook": "fp32"}
    size = int(TRUE.gradient_bytes)
    return {
        "compute/fp32": {"seconds": {n: compute(TRUE, n) for n in (2, 4)}, "gradient_bytes": size, "stored_bytes": 1},
        "reduces/2": {"seconds": {n: all_reduce(TRUE, n, 2) for n in (1 << 16, 1 << 22)}},
        "strong/fp32/2": {"seconds": step(TRUE, 16, 2), "replicas_equal": True, "job": job},
    }


def roof():
    import torch

    asked = work((8, 8), 1, 64, 1.0, torch.bfloat16, "int8")
    figures = {"operations": 128.0, "weight_bytes": 64, "data_bytes": asked.data_bytes, "multiplied": "int8",
               "intensity": asked.intensity, "seconds": 1e-6}  # fmt: skip
    ceilings = {"compute": {"fp32": 1e9, "bf16": 2e9, "int8": 4e9}, "triad": 1e9, "stream": 5e8, "file": 1e9,
                "all-reduce": 1e8}  # fmt: skip
    return {**{name: {"value": value} for name, value in ceilings.items()}, "int8 int8": {"rows": {"1": figures}}}


def quality():
    row = {"quality": [[80, 3.0], [160, 2.2]], "seconds": 10.0, "quiet": True, "model_bytes": 2000, "peak_rss_mib": 9}
    rows = {f"fp32/seed{seed}": {**row, "samples": 160} for seed in range(8)}
    return rows | {f"bitnet/seed{seed}": {**row, "samples": 240, "quiet": False, "seconds": None} for seed in range(4)}


RESULT = {
    "time_to_quality": ({"ways": {"fp32": 1, "bitnet": 1, "blast": 1}, "target": 2.3}, quality()),
    "large_batch": ({"ways": ["bf16"], "optimizers": ["lars"], "batches": [16, 64, 256], "seeds": [0, 1, 2]}, sweep()),
    "vision": (
        {"models": {"vit": ["bf16"], "resnet": ["bf16"]}, "optimizers": ["lars"], "batches": [16, 64, 256],
         "seeds": [0, 1, 2]}, {**sweep("vit/"), **sweep("resnet/")},
    ),
    "roofline": ({}, roof()),
    "scaling": ({"methods": ["fp32"]}, scaled()),
    "throughput": ({}, {"fp32/2": {"instances": 2, "counted": 2, "seconds": 40.5, "models_an_hour": 177.78}}),
}  # fmt: skip
LINES = {
    "time to quality": [
        "| float32 | 8 | 160 | reference | 10.0 | 2 | 9 |",
        "| BitNet b1.58 (float master) | 4 | 240 | slower than the reference |  | 2 | 9 |",
        "| BLaST, 75 % of MLP blocks gone | 0 | too few runs |  |  |  |  |",
    ],
    "text sweep": [
        "| float, bfloat16 products | lars | 120 (100 to 140) at 3 | 128 (128 to not reached) at 3 | not reached |",
    ],
    "roofline": ["| int8 int8 | 1 | 1.33 | 0.1 | memory | 10 % |"],
    "scaling": ["Replicas were equal in every run.", "| float32 | 2 | 16 | 1 | 4 | 29.4 | 29.4 | +0 % |"],
    "throughput": ["| float32 | 2 | 2 | 40.5 | 177.78 |"],
}


@pytest.fixture
def results(tmp_path):
    for name, (protocol, rows) in RESULT.items():
        content = {**CONDITIONS, "protocol": protocol, "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_the_page_is_that_of_the_results():
    page = (ROOT / "docs" / "measurement.md").read_text()
    assert render(page) == page, "run `make tables`"


def test_the_plots_are_those_of_the_results():
    folder = ROOT / "docs" / "plots"
    there = {path.stem: path.read_text() for path in folder.glob("*.svg")}
    assert plots.drawable(RESULTS) == there, "run `make tables`"


@pytest.mark.parametrize("name", sorted(TABLES))
def test_tables(name, results, tmp_path_factory):
    text = section(results, name)
    assert "Measured 2026-12-01 on x (avx2), 1 threads; torch 2." in text
    for line in LINES.get(name, []):
        assert line in text.splitlines(), text
    # without results the page says what measures them
    assert "Not measured yet: `python -m benchmarks." in section(tmp_path_factory.mktemp("empty"), name)


def test_every_image_is_drawn(results, monkeypatch):
    monkeypatch.setattr(plots, "PLOTS", {name: (file, draw, "") for name, (file, draw, _) in plots.PLOTS.items()})
    found = plots.drawable(results)
    assert set(found) == {file for file, _ in render_measurement.IMAGES.values()} == set(plots.PLOTS)
    for text in found.values():
        assert ElementTree.fromstring(text).tag.endswith("svg")
    # a cell whose runs did not all arrive is no point: one circle for batch 16, one in the legend
    assert found["large_batch"].count("<circle") == 2
    assert "<path d=" in found["roofline"] and "roof int8" in found["roofline"]


def test_axes():
    wide, straight = axis("x", [1.0, 1000.0], log=True), axis("y", [0.0, 10.0])
    assert wide.ticks()[:4] == [1, 2, 5, 10] and straight.ticks() == [0, 2, 4, 6, 8, 10]
    assert wide.place(wide.low) == 0 and wide.place(wide.high) == pytest.approx(1)
    assert wide.place(math.sqrt(1000)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="logarithmic"):
        axis("x", [0.0], log=True)
    with pytest.raises(ValueError, match="nothing to plot"):
        axis("x", [])


def test_names_are_escaped_and_points_lie_where_they_should():
    text = plot("a < b", axis("x", [0.0, 1.0]), axis("y", [0.0, 1.0]), [Series("s", [(0.5, 0.5)])])
    assert "a &lt; b" in text and '<circle cx="310.0" cy="202.0"' in text
