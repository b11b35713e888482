"""What `compress` wrote to report.json, on a card: stages with measured quality, bytes, time, plan and data.

A report belongs to a checkpoint when it lists the same modules with the same schemes (`modules_digest`) and the same
low-bit bytes; training in the folder leaves traces. Another report is not shown. Every text in it is data of others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import markdown
from .facts import Facts, read_json
from .origin import TRAINING_TRACES


REPORT = "report.json"
NAMES = {"dense": "dense model", "layer": "layer by layer", "block": "block by block", "global": "as a whole"}


def read(folder: str | Path) -> dict | None:
    """The report of the compression that made a checkpoint folder, or None."""
    folder = Path(folder)
    if not (folder / REPORT).is_file() or any((folder / trace).exists() for trace in TRAINING_TRACES):
        return None
    found = read_json(folder / REPORT)
    if not is_run(found):
        return None
    config = read_json(folder / "config.json").get("quantization_config") or {}
    return found if found.get("modules_digest") == config.get("modules_digest") else None


def is_run(report: Any) -> bool:
    """Whether a report is one of `compress`: of stages, not of a model alone."""
    stages = report.get("stages") if isinstance(report, Mapping) else None
    if not isinstance(stages, Mapping) or not stages or not isinstance(report.get("report"), Mapping):
        return False
    known = [isinstance(s, Mapping) and _finite(s.get("bytes")) and _finite(s.get("seconds")) for s in stages.values()]
    return all(known)


def belongs(run: Mapping, measured: Facts) -> bool:
    """Whether a run ended in the tensors that were measured."""
    return run["report"].get("lowbit_bytes") == sum(group.bytes for group in measured.lowbit)


def results(run: Mapping) -> list[dict]:
    """The last stage's quality as `evaluation.read` takes it; empty where none was measured, or it is not finite."""
    how = (run.get("protocol") or {}).get("evaluation")
    last, dense = list(run["stages"].values())[-1], run["stages"].get("dense", {})
    if not isinstance(how, Mapping) or not _finite(last.get("value")):
        return []
    scored = f"{how.get('scoring')}; {last.get('tokens')} scored"
    result = {"metric_type": str(last["metric"]), "metric_name": str(last["metric"]),
              "metric_value": last["value"], "dataset_name": str(how.get("data")), "protocol": scored}  # fmt: skip
    return [{**result, **({"baseline": dense["value"]} if _finite(dense.get("value")) else {})}]


def table(run: Mapping) -> str:
    """The stages as Markdown: quality, bytes, seconds, memory."""
    stages = run["stages"]
    metric = next((s["metric"] for s in stages.values() if s.get("metric")), None)
    header = ["Stage", *([f"#{markdown.plain(metric)}"] if metric else []), "#Size", "#Seconds", "#Peak memory so far"]
    rows = []
    for name, stage in stages.items():
        value = [f"{stage['value']:.4g}" if _finite(stage.get("value")) else "not finite"] if metric else []
        peak = stage.get("peak_bytes")
        seconds = "" if name == "dense" else f"{stage['seconds']:,.1f}"
        label, memory = NAMES.get(name) or markdown.plain(name), markdown.size(peak) if _finite(peak) else ""
        rows.append([label, *value, markdown.size(stage["bytes"]), seconds, memory])
    return markdown.table(header, rows)


def plan_table(run: Mapping) -> str:
    """How the weights of each role were rounded; empty where the report does not say."""
    modules = run["stages"].get("layer", {}).get("modules") or []
    roles: dict[str, list[Mapping]] = {}
    for module in modules:
        roles.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", str(module.get("name"))), []).append(module)
    rows = []
    for role, members in roles.items():
        widths: dict[str, int] = {}
        for bits in sorted(str(m.get("bits")) for m in members):
            widths[bits] = widths.get(bits, 0) + 1
        errors = [m["error"] for m in members if _finite(m.get("error"))]
        rows.append([
            markdown.code(role), ", ".join(f"{markdown.plain(b)} ({n})" for b, n in widths.items()),
            ", ".join(sorted({markdown.plain(m.get("method")) for m in members})),
            f"{sum(errors) / len(errors):.2e}" if errors else "", f"{max(errors):.2e}" if errors else "",
        ])  # fmt: skip
    header = ("Weights", "Bits (of how many)", "Method", "#Mean error", "#Largest error")
    return markdown.table(header, rows) if rows else ""


def data_of(run: Mapping) -> str:
    """A sentence about the data that the run was calibrated on."""
    found = (run.get("protocol") or {}).get("calibration")
    if not isinstance(found, Mapping):
        return "No calibration data was used."
    held = found.get("held_out_rows")
    held = f", {markdown.plain(held)} more held out to choose what is kept" if held else ""
    tokens = f" ({markdown.plain(found['tokens'])} tokens)" if found.get("tokens") else ""
    rows, data = markdown.plain(found.get("rows")), markdown.plain(found.get("data"))
    return f"Calibrated on {rows} rows{tokens} of {data}{held}."


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
