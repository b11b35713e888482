"""What a run writes down: figures of each stage, on what data and by what protocol they were measured.

Names of data never hold a path: reports and cards are published.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sized
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn


def stage_record(model: nn.Module, scored: list[dict] | None, begin: float) -> dict:
    """Figures of a model that took the time since `begin` to make, evaluated on `scored`."""
    # imported when it is used: it pulls in transformers' list of models
    from ..compression.evaluate import evaluate

    seconds = time.perf_counter() - begin
    found = None if scored is None else evaluate(model, scored)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"metric": found and found.metric, "value": found and found.value, "tokens": found and found.count,
            "bytes": size, "seconds": round(seconds, 1), "peak_bytes": peak_bytes()}  # fmt: skip


def module_records(model: nn.Module) -> list[dict]:
    """How each weight was rounded (`ModuleRecord`); empty where all were rounded without data."""
    return [asdict(found) for found in getattr(model, "lowbit_records", [])]


def protocol(
    calibration: dict | None, evaluation: tuple[str, list[dict]] | None, model: nn.Module, length: int
) -> dict:
    """What the figures depend on, for the report: `calibration` as given, and how rows of `evaluation` are scored."""
    from ..compression.evaluate import scoring

    name, rows = evaluation or (None, None)
    how = None if rows is None else {"data": name, "scoring": scoring(rows, model, length)}
    return {"calibration": calibration, "evaluation": how}


def calibration_facts(name: str, training: list[dict], held_out: list[dict] | None, seed: int) -> dict:
    """How much data there is to calibrate on, for the report."""
    tokens = [sum(b["input_ids"].numel() for b in part if "input_ids" in b) for part in (training, held_out or [])]
    return {"data": name, "rows": len(training), "tokens": tokens[0], "held_out_rows": len(held_out or []),
            "held_out_tokens": tokens[1], "seed": seed}  # fmt: skip


def name_of(data: Any) -> str:
    """What to call data: a file by its name without folder, a data set by its own, anything else by its kind."""
    if isinstance(data, (str, os.PathLike)):
        return Path(data).stem
    info = getattr(data, "info", None)
    known = getattr(info, "dataset_name", None) or getattr(info, "builder_name", None)
    if isinstance(known, str) and known and os.sep not in known:
        return known
    if isinstance(data, Tensor):
        return "token ids"
    items = list(data) if isinstance(data, (list, tuple)) else []
    kind = "texts" if items and isinstance(items[0], str) else "rows"
    count = f"{len(data)} " if isinstance(data, Sized) else ""
    return f"{count}{kind} passed in memory"


def peak_bytes() -> int | None:
    """Largest resident size of this process so far, bytes; None where the system doesn't say."""
    if sys.platform == "win32":
        return None
    import resource

    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024
