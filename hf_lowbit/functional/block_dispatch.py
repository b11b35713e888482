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
    `sparsity` is the share of dead blocks, None where it is not known.
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
    sparsity: float | None = None


class BlockKernel(NamedTuple):
    """One implementation. `refuse(problem)` returns None to accept or a sentence that says why not.

    `run(x, values, col_indices, row_pointers, problem, scale)` gets x [M, K] with any strides, values and indices
    contiguous as `blocks.py` describes them, x and values of one dtype, and returns [M, NB * height] in that dtype. Of
    low-bit blocks the values are packed codes, and `scale` is what `block_codes.py` says; else it is None.

    `gradient(dy, x, col_indices, row_pointers, problem)` returns the gradient of float blocks, of the shape of the
    indices and a block; `swiglu(x, gate, up, col_indices, row_pointers, problem)` silu(x gate^T) * (x up^T) for two
    weights whose blocks lie at the same places. Both may be None: torch does it then.
    """

    name: str
    rank: int
    refuse: Callable[[BlockProblem], str | None]
    run: Callable[[Tensor, Tensor, Tensor, Tensor | None, BlockProblem, Tensor | None], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor | None, BlockProblem], Tensor] | None = None
    swiglu: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, BlockProblem], Tensor] | None = None


_kernels: list[BlockKernel] = []
_choices: dict[tuple, BlockKernel | None] = {}
# up to so many rows of x the values are read as they lie; from there on one copy in the order of the product pays
FEW_ROWS = 16
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


def rebuilds(problem: BlockProblem) -> bool:
    """Whether torch, where it runs, had better multiply with the dense weight, made anew for each product."""
    from .block_crossover import is_slower

    float_blocks = problem.bits is None and problem.rows > FEW_ROWS
    return float_blocks and forced_kernel() is None and is_slower("inference", problem)


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
        if rebuilds(problem):
            return [*tried, ("torch", f"{why} put back into a dense weight for each product: at {problem.rows} rows "
                                      f"torch was measured to be slower on the blocks ({reasons})")]  # fmt: skip
        return [*tried, ("torch", f"{why} by torch, operation by operation ({reasons})")]
    return [*tried, (runs.name, why)]
