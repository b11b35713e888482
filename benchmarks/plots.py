"""The plots of docs/measurement.md, made from benchmarks/results/*.json and written to docs/plots.

    python -m benchmarks.plots

A plot whose results are not there is left out, and said so.
"""

import json
import math
import statistics
from pathlib import Path

from benchmarks.batch_sweep import cells, samples_of
from benchmarks.record import RESULTS, ROOT
from benchmarks.roofline import attained
from benchmarks.svg import Series, axis, plot


def roofline_plot(content: dict) -> str:
    """Roofs, and every layer at its intensity."""
    rows = content["rows"]
    compute, bandwidth = rows["compute"]["value"], max(rows["triad"]["value"], rows["stream"]["value"])
    found: dict[str, list[tuple[float, float]]] = {}
    for name, _, figures, *_ in attained(rows):
        speed = figures["operations"] / figures["seconds"] / 1e9
        found.setdefault(name, []).append((figures["intensity"], speed))
    layers = [Series(name, sorted(points), line=False) for name, points in found.items()]
    across = [x for series in layers for x, _ in series.points]
    low, high = min(across), max(*across, *(value / bandwidth for value in compute.values()))
    roofs = []
    for name, value in compute.items():
        ridge = value / bandwidth
        start = [(low, low * bandwidth / 1e9)] if low < ridge else []
        ends = [(ridge, value / 1e9), (max(high, ridge), value / 1e9)]
        roofs.append(Series(f"roof {name}", [*start, *ends], marks=False))
    series = [*layers, *roofs]
    points = [point for one in series for point in one.points]
    return plot("Roofline, one thread", axis("operations a byte", [x for x, _ in points], log=True),
                axis("Gop/s", [y for _, y in points], log=True), series)  # fmt: skip


def sweep_plot(content: dict, title: str, model: str = "") -> str:
    """Median samples to the target by batch; cells whose runs did not all arrive are left out."""
    protocol, series = content["protocol"], []
    ways = protocol["models"][model] if model else protocol["ways"]
    for way in ways:
        for optimizer in protocol["optimizers"]:
            points = []
            for cell in cells([way], [optimizer], protocol["batches"], model):
                counts = samples_of(content["rows"], cell, protocol["seeds"])
                if counts and math.isfinite(max(counts)):
                    points.append((cell.batch, statistics.median(counts)))
            if points:
                series.append(Series(f"{way}, {optimizer}", points, dashed=way != "bf16"))
    points = [point for one in series for point in one.points]
    return plot(title, axis("batch, samples", [x for x, _ in points], log=True),
                axis("samples to the target", [y for _, y in points], log=True), series)  # fmt: skip


def quality_plot(content: dict) -> str:
    """Loss by samples, the mean of a method's runs as far as all of them went."""
    found: dict[str, list[list]] = {}
    for key, row in content["rows"].items():
        found.setdefault(key.split("/")[0], []).append(row["quality"])
    series = []
    for method, runs in found.items():
        together = zip(*runs, strict=False)
        points = [(step[0][0], statistics.fmean(value for _, value in step)) for step in together]
        series.append(Series(method, points, marks=False))
    target = content["protocol"]["target"]
    last = max(x for one in series for x, _ in one.points)
    first = min(x for one in series for x, _ in one.points)
    series.append(Series("target", [(first, target), (last, target)], marks=False, dashed=True))
    points = [point for one in series for point in one.points]
    return plot("Quality by samples (MLPerf-style, unofficial)", axis("samples", [x for x, _ in points]),
                axis("nats a byte", [y for _, y in points]), series)  # fmt: skip


# file of the plot -> (results, what draws it, which rows it cannot do without)
PLOTS = {
    "roofline": ("roofline", roofline_plot, "compute"),
    "large_batch": ("large_batch", lambda c: sweep_plot(c, "Text: samples to the target"), "bf16/adamw/16/"),
    "vision_vit": ("vision", lambda c: sweep_plot(c, "ViT: samples to the target", "vit"), "vit/bf16/adamw/16/"),
    "vision_resnet": (
        "vision", lambda c: sweep_plot(c, "ResNet: samples to the target", "resnet"), "resnet/bf16/adamw/16/",
    ),
    "time_to_quality": ("time_to_quality", quality_plot, "fp32/"),
}  # fmt: skip


def drawable(folder: Path = RESULTS) -> dict[str, str]:
    """name -> SVG text of every plot whose results are there."""
    found = {}
    for name, (results, draw, needed) in PLOTS.items():
        path = folder / f"{results}.json"
        content = json.loads(path.read_text()) if path.exists() else {"rows": {}}
        if any(key.startswith(needed) for key in content["rows"]):
            found[name] = draw(content)
    return found


def write(folder: Path = RESULTS, docs: Path = ROOT / "docs") -> None:
    found = drawable(folder)
    (docs / "plots").mkdir(exist_ok=True)
    for name, text in found.items():
        (docs / "plots" / f"{name}.svg").write_text(text)
    print(f"plots: {', '.join(found) or 'none'}; not measured yet: {', '.join(PLOTS.keys() - found.keys()) or 'none'}")


if __name__ == "__main__":
    write()
