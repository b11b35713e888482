"""Measured quality on a card: checked, as a table a person reads and as the Hub's `model-index`.

A result is a `huggingface_hub.EvalResult`, or a dict with its field names, of which `metric_type`, `metric_value` and
`dataset_name` are needed. A dict may add `baseline` (the same metric of the dense model) and `protocol` (how it was
measured: context length, tokens, few-shot count), which only the table shows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from huggingface_hub import EvalResult

from . import markdown


NEEDED = ("metric_type", "metric_value", "dataset_name")
OWN = ("baseline", "protocol")
FIELDS = (*(field.name for field in fields(EvalResult)), *OWN)


@dataclass
class Row:
    """One result, and what the Hub's format has no field for."""

    result: EvalResult
    baseline: float | None = None
    protocol: str = ""


def read(results: Iterable[EvalResult | Mapping] | None, pipeline_tag: str | None) -> list[Row]:
    """`results` as rows; what is missing, unknown or not a finite number is an error that names it."""
    if isinstance(results, (EvalResult, Mapping)):
        results = [results]
    return [_row(result, f"results[{number}]", pipeline_tag) for number, result in enumerate(results or [])]


def table(rows: list[Row]) -> str:
    """The rows as Markdown, with only the columns that have content; empty without rows."""
    if not rows:
        return ""
    header, lines = ["Data", "Metric", "#This model"], []
    baselines, protocols = any(row.baseline is not None for row in rows), any(row.protocol for row in rows)
    header += ["#Dense model"] * baselines + ["Protocol"] * protocols
    for row in rows:
        result = row.result
        data = " ".join(filter(None, (result.dataset_name, result.dataset_config, result.dataset_split)))
        cells = [data, result.metric_name or result.metric_type, _number(result.metric_value)]
        cells += [_number(row.baseline)] * baselines + [row.protocol] * protocols
        lines.append([markdown.plain(cell) for cell in cells])
    return markdown.table(header, lines)


def _row(result, where: str, pipeline_tag: str | None) -> Row:
    if isinstance(result, Mapping):
        result = dict(result)
        unknown = [name for name in result if name not in FIELDS]
        missing = [name for name in NEEDED if name not in result]
        if unknown or missing:
            complaint = f"has no field {unknown[0]!r}" if unknown else f"lacks {missing[0]!r}"
            raise ValueError(f"`{where}` {complaint}; needed are {list(NEEDED)}, possible are {list(FIELDS)}.")
        own = {name: result.pop(name) for name in OWN if name in result}
        result.setdefault("task_type", pipeline_tag or "other")
        # the Hub wants an id here; a data set without one gets its name in the form of one
        result.setdefault("dataset_type", re.sub(r"[^a-z0-9]+", "-", result["dataset_name"].lower()).strip("-"))
        row = Row(EvalResult(**result), **own)
    elif isinstance(result, EvalResult):
        row = Row(result)
    else:
        raise TypeError(f"`{where}` is a {type(result).__name__}; pass an EvalResult or a dict of its fields.")
    for name, value in (("metric_value", row.result.metric_value), ("baseline", row.baseline)):
        finite = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not finite and not (name == "baseline" and value is None):
            raise ValueError(f"`{where}` has `{name}`={value!r}, which is not a finite number; leave the result out.")
    return row


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
