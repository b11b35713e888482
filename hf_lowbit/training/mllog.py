"""The log format of MLPerf, written and read: one `:::MLLOG {json}` a line.

    {"namespace": "", "time_ms": milliseconds since 1970, "event_type": "POINT_IN_TIME", "INTERVAL_START" or
     "INTERVAL_END", "key": name, "value": anything, "metadata": {"file": ..., "lineno": ..., ...}}

The format and the keys are those of mlcommons/logging, whose compliance checker reads our files (`compliance.py`).
Writing needs none of its code. Files are named in the log relative to the package, so that no path of a machine gets
into a log that is shared.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path


TOKEN = ":::MLLOG "
PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True)
class Event:
    """One line of a log."""

    key: str
    value: object
    time_ms: int
    event_type: str
    metadata: dict


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)


class LogFile:
    """A log that is being written, line by line; a run that dies leaves what happened until then."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("", encoding="utf-8")

    def write(self, key: str, value: object = None, time_ms: int | None = None, **metadata) -> None:
        """One event. Keys that end in `_start` and `_stop` are the ends of intervals."""
        kind = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}.get(key.rpartition("_")[2], "POINT_IN_TIME")
        caller = sys._getframe(1)
        file = Path(caller.f_code.co_filename)
        file = file.relative_to(PACKAGE) if file.is_relative_to(PACKAGE) else Path(file.name)
        line = {
            "namespace": "", "time_ms": now_ms() if time_ms is None else time_ms, "event_type": kind, "key": key,
            "value": value, "metadata": {"file": file.as_posix(), "lineno": caller.f_lineno, **metadata},
        }  # fmt: skip
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(TOKEN + json.dumps(line) + "\n")


def read_log(path: str | Path) -> list[Event]:
    """The events of a log, in order; other lines are skipped. Raises ValueError for a line that is no event."""
    events = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        _, token, body = line.partition(TOKEN)
        if not token:
            continue
        try:
            found = json.loads(body)
            events.append(
                Event(found["key"], found["value"], found["time_ms"], found["event_type"], found["metadata"])
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not an MLPerf log event ({error!r}).") from None
    return events


@dataclass(frozen=True)
class Result:
    """What a log says about its run. `seconds` is infinite when the target was not reached."""

    benchmark: str
    seconds: float
    samples: float
    reached: bool
    quality: list[tuple[int, float]]


def read_result(path: str | Path) -> Result:
    """Time, samples and evaluations of a run.

    mlperf-logging's own summarizer does not read `run_stop`'s status, and takes an aborted run for a fast one; here it
    has no time. Raises ValueError for a log without a whole run.
    """
    events = read_log(path)
    by_key = {event.key: event for event in events}
    for key in ("submission_benchmark", "run_start", "run_stop"):
        if key not in by_key:
            raise ValueError(f"{path}: no `{key}`, so it is not the log of a whole run.")
    reached = by_key["run_stop"].metadata.get("status") == "success"
    quality = [(event.metadata["samples_count"], event.value) for event in events if event.key == "eval_accuracy"]
    seconds = (by_key["run_stop"].time_ms - by_key["run_start"].time_ms) / 1000
    benchmark = by_key["submission_benchmark"].value
    if not reached:
        return Result(benchmark, float("inf"), float("inf"), False, quality)
    return Result(benchmark, seconds, quality[-1][0], True, quality)
