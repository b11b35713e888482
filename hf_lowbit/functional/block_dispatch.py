"""Which code runs a product with live blocks, and why: a kernel, or torch operation by operation (`blocks.py`).

The first kernel in order of rank that accepts runs, torch where all refuse. A forced kernel (`dispatch.use_kernel`) is
taken alone; "reference" is torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import forced_kernel


class BlockProblem(NamedTuple):
    """What a kernel may look at to accept or refuse; hashable. `rows` is M, `block_rows` NB.

    `bits` of the live blocks, None where they are float; `int8_activations` rounds x, for low-bit blocks only.
    """

    height: int
    width: int
    block_rows: int
    in_features: int
    rows: int
    dtype: torch.dtype
    device: str
    bits: str | int | None = None
    int8_activations: bool = False


class BlockKernel(NamedTuple):
    """One implementation. `refuse(problem)` returns None to accept or a sentence that says why not.

    `run(x, values, col_indices, row_pointers, problem, scale)` gets x [M, K] with any strides, values and indices
    contiguous as `blocks.py` describes them, x and values of one dtype, and returns [M, NB * height] in that dtype. Of
    low-bit blocks the values are packed codes, and `scale` is what `block_codes.py` says; else it is None.
    """

    name: str
    rank: int
    refuse: Callable[[BlockProblem], str | None]
    run: Callable[[Tensor, Tensor, Tensor, Tensor | None, BlockProblem, Tensor | None], Tensor]


_kernels: list[BlockKernel] = []
_choices: dict[tuple, BlockKernel | None] = {}
# shapes come and go with the length of the prompt; a bound keeps the table small
MOST_CHOICES = 4096


def register_blocks(kernel: BlockKernel) -> None:
    """Add an implementation, or replace the one of the same name."""
    _kernels[:] = sorted([k for k in _kernels if k.name != kernel.name] + [kernel], key=lambda k: -k.rank)
    _choices.clear()


def choose_blocks(problem: BlockProblem) -> BlockKernel | None:
    """The kernel that runs; None for torch."""
    key = problem, forced_kernel()
    if key not in _choices:
        if len(_choices) > MOST_CHOICES:
            _choices.clear()
        named = [k for k in _kernels if k.name == key[1]] if key[1] else _kernels
        _choices[key] = next((k for k in named if k.refuse(problem) is None), None)
    return _choices[key]


def explain_blocks(problem: BlockProblem) -> list[tuple[str, str]]:
    """(kernel, reason) in the order they are tried: why not, and for the last one, which runs, why."""
    runs = choose_blocks(problem)
    tried = []
    for kernel in _kernels:
        if kernel is runs:
            break
        tried.append((kernel.name, kernel.refuse(problem) or "another kernel is forced"))
    kind = str(problem.dtype).removeprefix("torch.")
    if problem.bits is not None:
        activations = "int8" if problem.int8_activations else kind
        name = problem.bits if isinstance(problem.bits, str) else f"{problem.bits}-bit"
        kind = f"{activations} activations with {name}"
    why = f"{kind} blocks of {problem.height}x{problem.width}"
    if runs is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in tried)
        return [*tried, ("torch", f"{why} by torch, operation by operation ({reasons})")]
    return [*tried, (runs.name, why)]
