"""Whether products with live blocks alone are worth it, by what was measured (block_crossover.json).

The table has, for training steps (forward and both gradients) and for single products ("inference"), by the C library
and by torch alone, for dtypes, blocks and numbers of rows of x, the least sparsity from which on live blocks were never
slower than 1.05 times the dense product, and the highest at which they were. `python -m benchmarks.crossover` derives
it from the measurement.

Between the measured points, ratios are taken to grow with blocks and to fall with rows of x. `pays` asks for evidence
that live blocks are no slower, and `is_slower` for evidence that they are: what was not measured (other dtypes, other
devices, smaller blocks, lower sparsities) is neither.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from pathlib import Path

import torch

from .block_dispatch import BlockProblem, choose_blocks


TABLE = Path(__file__).with_suffix(".json")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@cache
def read_table() -> tuple[dict, ...]:
    """The rows of the table."""
    return tuple(json.loads(TABLE.read_text())["rows"])


def cells_of(use: str, by: str, dtype: torch.dtype) -> list[dict]:
    """The rows of the table for a kind of product."""
    return [row for row in read_table() if (row["use"], row["by"], row["dtype"]) == (use, by, NAMES.get(dtype))]


@lru_cache(maxsize=4096)
def least_sparsity(use: str, by: str, dtype: torch.dtype, block: int, rows: int) -> float | None:
    """From which sparsity on live blocks pay for `use` ("training", "inference"); None: from none that was measured."""
    found = []
    cells = [cell for cell in cells_of(use, by, dtype) if cell["block"] <= block]
    for size in {cell["block"] for cell in cells}:
        same = sorted((cell for cell in cells if cell["block"] == size), key=lambda cell: cell["rows"])
        # where more rows than ever were measured are asked for, the most that were
        found.append(next((cell for cell in same if cell["rows"] >= rows), same[-1])["sparsity"])
    return min((sparsity for sparsity in found if sparsity is not None), default=None)


@lru_cache(maxsize=4096)
def slower_sparsity(use: str, by: str, dtype: torch.dtype, block: int, rows: int) -> float | None:
    """Up to which sparsity live blocks were slower, with blocks no smaller and rows no more; None: never."""
    cells = [cell for cell in cells_of(use, by, dtype) if cell["block"] >= block and cell["rows"] <= rows]
    return max((cell["slower"] for cell in cells if cell["slower"] is not None), default=None)


def pays(use: str, problem: BlockProblem) -> bool:
    """Whether what would run for `problem` was measured to be no slower than the dense product."""
    least = least_sparsity(*_cell(use, problem)) if problem.device == "cpu" else None
    # a row of few block columns can't be pruned to just what was asked for: shares are compared in whole per cents
    return least is not None and problem.sparsity is not None and round(problem.sparsity, 2) >= least


def is_slower(use: str, problem: BlockProblem) -> bool:
    """Whether what would run for `problem` was measured to be slower than the dense product."""
    highest = slower_sparsity(*_cell(use, problem)) if problem.device == "cpu" else None
    return highest is not None and problem.sparsity is not None and round(problem.sparsity, 2) <= highest


def _cell(use: str, problem: BlockProblem) -> tuple[str, str, torch.dtype, int, int]:
    by = "torch" if choose_blocks(problem) is None else "library"
    return use, by, problem.dtype, min(problem.height, problem.width), problem.rows
