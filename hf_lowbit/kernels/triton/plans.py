"""Which kernel runs in which shapes: looked up in tables/, never timed at a first call.

A table holds, for a generation of devices, tile shapes for each range of rows of x; what follows from the problem is
computed here: a tile's step along K must lie in one group, and K is cut into as many parts as keep the device's
processors busy. `python -m benchmarks.gpu --tune` measures candidates and writes a table; HF_LOWBIT_TRITON_TABLE
names a file to use instead.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from ...functional.dispatch import Problem
from ...functional.grid import grid_of
from ...functional.packing import row_bytes


TABLE_VARIABLE = "HF_LOWBIT_TRITON_TABLE"
TABLES = Path(__file__).with_name("tables")
# shorter parts of K spend their time on filling the pipeline
LEAST_STEPS = 4
# packed weights of one step of a tile; several steps lie in shared memory
MOST_TILE_BYTES = 16384
MOST_PARTS = 16


class Plan(NamedTuple):
    """One way to a product. `block_k` counts columns; for "words" (dp4a, one row) stored words of 32 bits.

    `per_processor`: programs a processor should get before K is cut no further. `scale_first`: round s (q - z) to x's
    dtype before the product, where the sums of a tile are larger than the tile's weights. `scale_ahead`: read the
    scales of a step during the one before it.
    """

    kernel: str
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    per_processor: int
    scale_first: bool
    scale_ahead: bool
    parts: int = 1
    part_steps: int = 0

    def __str__(self) -> str:
        shape = f"{self.block_m} x {self.block_n} x {self.block_k}"
        name = "dp4a on words" if self.kernel == "words" else "tensor cores on tiles"
        return f"{name} of {shape} (M, N, K), " + (f"K in {self.parts} parts" if self.parts > 1 else "K whole")


def table_name(capability: tuple[int, int]) -> str:
    """The table of a device. Consumer Blackwell (12.x) has the memory and instructions of Ampere's generation."""
    return "sm_90" if capability[0] in (9, 10) else "sm_80"


@lru_cache
def read_table(name: str) -> list[dict]:
    """The rows of a table: of `HF_LOWBIT_TRITON_TABLE`, where it is set, else the one named `name`."""
    given = os.environ.get(TABLE_VARIABLE)
    path = Path(given) if given else TABLES / f"{name}.json"
    rows = json.loads(path.read_text())["rows"]
    for row in rows:
        if unknown := sorted(set(row) - {*Plan._fields, "activations", "max_rows"}):
            raise ValueError(f"`{unknown[0]}` in {path} is no field of a plan; use {list(Plan._fields)}.")
    return rows


def can_use_words(problem: Problem, aligned: bool) -> bool:
    """Whether rows of the weight are whole words that begin on their addresses (`aligned`: the first row does)."""
    if not (problem.int8_activations and problem.rows == 1 and aligned):
        return False
    if problem.bits == 3:
        return problem.in_features % 16 == 0 and row_bytes(problem.in_features, grid_of(3)) % 4 == 0
    return row_bytes(problem.in_features, grid_of(problem.bits)) % 4 == 0


def group_of(problem: Problem) -> int:
    """Columns that share a scale inside a row, 0 where one scale serves the row."""
    return problem.group_size if 0 < problem.group_size < problem.in_features else 0


@lru_cache(maxsize=4096)
def plan_for(problem: Problem, capability: tuple[int, int], processors: int, aligned: bool) -> Plan:
    """The plan of a problem on a device with so many multiprocessors."""
    activations = "int8" if problem.int8_activations else "float"
    words = can_use_words(problem, aligned)
    for row in read_table(table_name(capability)):
        fits = row["activations"] == activations and (row["max_rows"] is None or problem.rows <= row["max_rows"])
        if fits and (words or row["kernel"] == "tiles"):
            fields = {key: value for key, value in row.items() if key in Plan._fields}
            return complete(Plan(**fields), problem, processors)
    raise ValueError(f"the table {table_name(capability)} has no row for {problem.rows} rows of {activations} x")


def tile_count(plan: Plan, problem: Problem) -> int:
    """Tiles of y."""
    return -(-problem.rows // plan.block_m) * -(-problem.out_features // plan.block_n)


def narrow(plan: Plan, problem: Problem, most_parts: int, processors: int) -> Plan:
    """`plan` with fewer columns of y a tile, where a small layer would leave processors without one."""
    # four warps share the 64 rows of W of a product instruction on Hopper
    least = 4 if plan.kernel == "words" else 16 * plan.warps
    while tile_count(plan, problem) * most_parts < processors and plan.block_n > least:
        plan = plan._replace(block_n=plan.block_n // 2)
    return plan


def complete(plan: Plan, problem: Problem, processors: int) -> Plan:
    """`plan` with its tile and step fitted to the problem and the device, and with the parts of K."""
    group = group_of(problem)
    if plan.kernel == "words":
        per_word = 16 if problem.bits == 3 else 32 // grid_of(problem.bits).field_bits
        length, block_k = -(-problem.in_features // per_word), plan.block_k
    else:
        length, field_bits = problem.in_features, grid_of(problem.bits).field_bits
        block_k = min(plan.block_k, MOST_TILE_BYTES * 8 // (4 if field_bits == 3 else field_bits) // plan.block_n)
        if problem.dtype == torch.float32 and not problem.int8_activations:
            # twice the bytes, and three products
            block_k, plan = max(32, block_k // 4), plan._replace(block_m=min(plan.block_m, 64))
        if group:
            # the largest power of two that divides the group
            block_k = min(block_k, group & -group)
        block_k = max(32, min(block_k, 1 << (problem.in_features - 1).bit_length()))
    steps = -(-length // block_k)
    plan = narrow(plan, problem, min(max(steps // LEAST_STEPS, 1), MOST_PARTS), processors)
    tiles = tile_count(plan, problem)
    parts = max(1, min(plan.per_processor * processors // max(tiles, 1), steps // LEAST_STEPS, MOST_PARTS))
    part_steps = -(-steps // parts)
    return plan._replace(block_k=block_k, parts=-(-steps // part_steps), part_steps=part_steps)
