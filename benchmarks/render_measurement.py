"""The tables of docs/measurement.md, made from benchmarks/results/*.json.

    python -m benchmarks.render_measurement

A table whose results are not there yet says which script measures them, and on what machine.
"""

import json
import math
import statistics
from pathlib import Path

from benchmarks import scaling
from benchmarks.batch_sweep import Cell, chosen, samples_of
from benchmarks.convergence import olympic
from benchmarks.plots import drawable
from benchmarks.record import RESULTS, ROOT
from benchmarks.render import conditions, replace_between, table
from benchmarks.render_training import WORDS as TRAINING
from benchmarks.roofline import CEILINGS, attained
from benchmarks.time_model import errors, step
from benchmarks.time_to_quality import REFERENCE, judge
from benchmarks.time_to_quality import samples_of as runs_of


WORDS = {**TRAINING, "bf16": "bfloat16 products", "blast": "BLaST, 75 % of MLP blocks gone", "dqt-8": "8 bits"}
WAYS = {"bf16": "float, bfloat16 products", "dqt-8": "8-bit codes"}


def quality_table(content: dict) -> str:
    """Samples to the target, whether that is luck, seconds where the machine was quiet, and bytes."""
    rows, lines = content["rows"], []
    reference = runs_of(rows, REFERENCE)
    for method in content["protocol"]["ways"]:
        counts = runs_of(rows, method)
        if len(counts) < 3:
            lines.append([WORDS[method], str(len(counts)), "too few runs", "", "", "", ""])
            continue
        found = [row for key, row in rows.items() if key.startswith(f"{method}/")]
        mean, told = olympic(counts), "reference" if method == REFERENCE else judge(reference, counts)
        seconds = [math.inf if row["samples"] is None else row["seconds"] for row in found if row["quiet"]]
        lines.append([
            WORDS[method], str(len(counts)), f"{mean:.0f}" if math.isfinite(mean) else "not reached", told,
            f"{olympic(seconds):.1f}" if len(seconds) == len(counts) and None not in seconds else "",
            f"{found[0]['model_bytes'] / 1000:.0f}", f"{statistics.median(row['peak_rss_mib'] for row in found):.0f}",
        ])  # fmt: skip
    return table(["weights", "runs", "samples to target", "against luck", "seconds", "saved kB", "peak MiB"], lines)


def sweep_table(content: dict, model: str = "") -> str:
    """Median samples to the target (lowest to highest), a column a batch."""
    protocol, rows, lines = content["protocol"], content["rows"], []
    for way in protocol["models"][model] if model else protocol["ways"]:
        for optimizer in protocol["optimizers"]:
            cells = [Cell(way, optimizer, batch, model) for batch in protocol["batches"]]
            lines.append([WAYS[way], optimizer, *(_cell(rows, cell, protocol["seeds"]) for cell in cells)])
    return table(["weights", "optimizer", *(f"batch {batch}" for batch in protocol["batches"])], lines)


def _cell(rows: dict, cell: Cell, seeds) -> str:
    counts = samples_of(rows, cell, seeds)
    if not counts:
        return ""
    rate, middle = f"{chosen(rows, cell):g}", statistics.median(counts)
    if not math.isfinite(middle):
        return "not reached"
    ends = "" if len(counts) == 1 else f" ({min(counts):.0f} to {max(counts):.0f})"
    return f"{middle:.0f}{ends.replace('inf', 'not reached')} at {rate}{', one seed' if len(counts) == 1 else ''}"


def roofline_table(content: dict) -> str:
    """Ceilings in a sentence, layers in a table."""
    rows = content["rows"]
    words = ", ".join(f"{value / 1e9:.0f} {name}" for name, value in rows["compute"]["value"].items())
    moved = ", ".join(f"{name} {rows[name]['value'] / 1e9:.2f}" for name in CEILINGS if name != "compute")
    lines = [
        [name, many, f"{figures['intensity']:.2f}", f"{figures['operations'] / figures['seconds'] / 1e9:.1f}", ceiling,
         f"{100 * share:.0f} %"]
        for name, many, figures, _, ceiling, share in attained(rows)
    ]  # fmt: skip
    header = ["layer", "rows of x", "operations a byte", "Gop/s", "ceiling", "attained"]
    return f"Ceilings, Gop/s: {words}. GB/s: {moved}.\n\n{table(header, lines)}"


def scaling_table(content: dict) -> str:
    """Measured steps beside the model of time."""
    rows, lines, told = content["rows"], [], []
    for method in content["protocol"]["methods"]:
        constants, measured = scaling.model_of(rows, method), scaling.points(rows, method)
        wrong = errors(constants, measured)
        off = [100 * abs(error) for error in wrong]
        told.append(
            f"{WORDS[method]}: a step takes {1e3 * constants.fixed:.1f} ms and {1e3 * constants.per_sample:.2f} ms a "
            f"sample; {constants.overlap:.0%} of that hides communication; the model is "
            f"{statistics.fmean(off):.0f} % off on average, {max(off):.0f} % at worst."
        )
        for (seconds, batch, processes, buckets, share), error in zip(measured, wrong, strict=True):
            modelled = step(constants, batch, processes, buckets, share)
            lines.append([
                WORDS[method], str(processes), f"{batch:.0f}", str(buckets), f"{4 * share:.0f}",
                f"{1e3 * seconds:.1f}", f"{1e3 * modelled:.1f}", f"{100 * error:+.0f} %",
            ])  # fmt: skip
    equal = all(row["replicas_equal"] for row in rows.values() if "replicas_equal" in row)
    told.append(f"Replicas were {'equal in every run' if equal else 'NOT equal in every run'}.")
    header = ["weights", "processes", "batch", "buckets", "bytes a gradient", "ms", "model, ms", "error"]
    return "\n".join([*told, "", table(header, lines)])


def throughput_table(content: dict) -> str:
    lines = [
        [WORDS[key.split("/")[0]], str(row["instances"]), str(row["counted"]), f"{row['seconds']}",
         f"{row['models_an_hour']}"]
        for key, row in content["rows"].items()
    ]  # fmt: skip
    return table(["weights", "models at once", "arrived", "seconds", "models an hour"], lines)


QUIET = "a machine without other work"
# marker -> (results, what makes the table, what it cannot do without: beginnings of keys, where it is measured)
TABLES = {
    "time to quality": ("time_to_quality", quality_table, ("fp32/",), "any machine"),
    "text sweep": ("large_batch", sweep_table, ("bf16/",), "any machine"),
    "vit sweep": ("vision", lambda content: sweep_table(content, "vit"), ("vit/",), "any machine"),
    "resnet sweep": ("vision", lambda content: sweep_table(content, "resnet"), ("resnet/",), "any machine"),
    "roofline": ("roofline", roofline_table, tuple(CEILINGS), QUIET),
    "scaling": ("scaling", scaling_table, ("compute/", "strong/", "reduces/"), QUIET),
    "throughput": ("throughput", throughput_table, ("",), QUIET),
}

# marker -> its plot and what the plot is called
IMAGES = {
    "time to quality": ("time_to_quality", "Quality by samples"),
    "text sweep": ("large_batch", "Samples to the target by batch, text"),
    "vit sweep": ("vision_vit", "Samples to the target by batch, ViT"),
    "resnet sweep": ("vision_resnet", "Samples to the target by batch, ResNet"),
    "roofline": ("roofline", "Roofline"),
}


def section(folder: Path, name: str) -> str:
    """The text between the markers of `name`: table, conditions, plot."""
    results, make, needed, where = TABLES[name]
    path = folder / f"{results}.json"
    content = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    if not all(any(key.startswith(start) for key in content["rows"]) for start in needed):
        return f"Not measured yet: `python -m benchmarks.{results}` does it, on {where}."
    file, words = IMAGES.get(name, ("", ""))
    image = f"\n\n![{words}](plots/{file}.svg)" if file in drawable(folder) else ""
    source = f"[{path.name}](../benchmarks/results/{path.name})"
    return f"{make(content)}\n\n{conditions(content)} {source}{image}"


def render(page: str, folder: Path = RESULTS) -> str:
    """`page` with every table as the results have it."""
    for name in TABLES:
        page = replace_between(page, name, section(folder, name))
    return page


def write(folder: Path = RESULTS, docs: Path = ROOT / "docs") -> None:
    path = docs / "measurement.md"
    path.write_text(render(path.read_text(), folder))
    print(f"tables: {path}")


if __name__ == "__main__":
    write()
