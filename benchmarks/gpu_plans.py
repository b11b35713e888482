"""Tuning of the Triton kernels' tables: candidates of shapes, timed on the device at hand, the best of each written.

For each row of the device's table, the plan with the least geometric mean of times over the shapes and bit widths that
it serves. The table of the package is written over, for a person to read, test and commit; candidates come in a random
but fixed order, so that a run that ends early has seen all kinds of them.
"""

import dataclasses
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu_timing import captured, device_ring, interleaved
from hf_lowbit.functional.dispatch import Problem
from hf_lowbit.kernels.triton.plans import TABLES, Plan, complete, read_table, table_name


# what decides between plans: the widest and the narrowest fields in use, and the activations of a row
SCHEMES = {"int8": [("ternary", "tensor"), (4, 128)], "float": [(4, 128), (3, 128)]}


@dataclasses.dataclass(frozen=True)
class Case:
    """One product to time: a scheme at a shape with so many rows."""

    bits: str | int
    group: int | str
    shape: tuple[int, int]
    rows: int
    int8: bool

    def problem(self) -> Problem:
        group = self.group if isinstance(self.group, int) else 0
        return Problem(
            self.bits, group, self.group == "tensor", False, self.int8, *self.shape, self.rows, torch.bfloat16, "cuda"
        )


def candidates(row: dict) -> list[Plan]:
    """Plans to try for a row of a table, its own first."""
    own = Plan(**{key: value for key, value in row.items() if key in Plan._fields})
    if own.kernel == "words":
        choices = itertools.product((1,), (8, 16, 32), (64, 128, 256), (4, 8), (2, 4), (2, 4, 8), (False,), (False,))
    else:
        heights = [m for m in (8, 16, 32, 64, 128, 256) if m <= (row["max_rows"] or 256)][-2:]
        first = (False,) if row["activations"] == "int8" else (False, True)
        choices = itertools.product(
            heights, (64, 128, 256), (64, 128, 256), (4, 8), (2, 3, 4, 5), (1, 2, 4), first, (False, True)
        )
    others = [Plan(own.kernel, *choice) for choice in choices]
    random.Random(0).shuffle(others)
    return [own, *(plan for plan in others if plan != own)]


def best_plan(row: dict, cases: list[Case], seconds: Callable[[Plan, Case], float], until: float) -> Plan:
    """The candidate with the least geometric mean of `seconds`; those that do not fit the device are left out."""
    best, best_mean = None, math.inf
    for plan in candidates(row):
        if best is not None and time.perf_counter() > until:
            print("Time is up: the rest of the candidates is left out.")
            break
        try:
            mean = math.exp(sum(math.log(seconds(plan, case)) for case in cases) / len(cases))
        except Exception as error:  # a plan may ask for more shared memory or registers than there are
            print(f"  left out {plan}: {type(error).__name__}", flush=True)
            continue
        if mean < best_mean:
            best, best_mean = plan, mean
            print(f"  {mean * 1e6:.2f} us: {plan}", flush=True)
    if best is None:
        raise RuntimeError(f"no plan runs for {row}")
    return best


def tune(shapes: list[tuple[int, int]], until: float) -> int:
    """Time and write the table of the current device."""
    from hf_lowbit.kernels.triton.product import product

    capability = torch.cuda.get_device_capability()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    name, found = table_name(capability), []
    table = read_table(name)
    for index, row in enumerate(table):
        int8, rows = row["activations"] == "int8", row["max_rows"] or 2048
        cases = [Case(*scheme, shape, rows, int8) for scheme in SCHEMES[row["activations"]] for shape in shapes]
        rings = {case: device_ring(case.bits, case.group, case.shape, torch.device("cuda")) for case in cases}
        print(f"row {index + 1} of {len(table)}: {row['activations']}, M={rows}", flush=True)

        def seconds(plan: Plan, case: Case, rings=rings) -> float:
            problem, ring = case.problem(), rings[case]
            fitted = complete(plan, problem, processors)
            x = torch.randn(case.rows, case.shape[1], device="cuda").bfloat16()
            graph = captured(lambda x, i: product(x, *ring[i], None, None, problem, fitted), x, len(ring))
            return statistics.median(interleaved({"": graph}, len(ring))[""])

        share = (until - time.perf_counter()) / (len(table) - index)
        plan = best_plan(row, cases, seconds, time.perf_counter() + share)
        found.append({"activations": row["activations"], "max_rows": row["max_rows"], **_stored(plan)})
    path = TABLES / f"{name}.json"
    path.write_text(render(name, f"timed on {torch.cuda.get_device_name()}", found))
    print(f"wrote {path}")
    return 0


def _stored(plan: Plan) -> dict:
    return {key: value for key, value in plan._asdict().items() if key not in ("parts", "part_steps")}


def render(name: str, origin: str, rows: list[dict]) -> str:
    """A table as JSON, a row a line."""
    devices = json.loads((TABLES / f"{name}.json").read_text())["devices"]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = f'{{\n "devices": {json.dumps(devices)},\n "origin": {json.dumps(origin)},\n'
    return f'{head} "rows": [\n{lines}\n ]\n}}\n'
