"""What can be moved, and how: low-bit codes, learned scales, and float parameters.

A leaf presents its weight as a matrix of R rows and K columns (codes: storage orientation; vectors: one row), hands
out its gradient that way, and moves some of its rows by a step `-rate * u`. Where processes share out the rows
(`shards.py`), R are those of this process, `own` of the whole matrix, and `whole` gives all of them to be filled:

    codes    q' = clamp(q + SR(-rate * u / s - rate_decay * (q - z)))     functional/stochastic.py
    scale    s' = s * exp(-rate * u)                                      positive, whatever the step; no decay
    float    w' = w (1 - rate_decay) - rate * u                           bfloat16: rounded stochastically
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..functional.grid import dequantize, expand_groups, grid_of
from ..functional.moments import to_bfloat16
from ..functional.noise import uniform
from ..functional.packing import pack, unpack
from ..functional.stochastic import apply_step, round_step
from ..nn.slot import CodesParameter
from .shards import RowGradient, Shards


# elements of a float parameter below which each process keeps all of it
SMALLEST_SHARED = 4096


class Moved(NamedTuple):
    """Codes that changed, and the levels that all steps together asked for, each at most the span of its grid."""

    changed: int = 0
    levels: float = 0.0


class Leaf(Protocol):
    """One weight that is trained."""

    name: str
    parameter: Tensor
    all_rows: int
    own: slice
    shared: bool
    rows: int
    columns: int
    needs_noise: bool

    def gradient(self) -> Tensor | None:
        """[R, K] in the gradient's dtype, or None."""

    def weight_rms(self) -> float:
        """Root mean square of the weight."""

    def layer(self) -> Tensor | None:
        """float32 [R, K]: the weight that layer-wise rules take the norm of; None where they do not adapt the rate."""

    def move(self, rows: slice, step: Tensor, decay: float, words: Tensor | None) -> Moved:
        """Move `rows` by `step` (float32, may be overwritten), after shrinking them by the factor 1 - `decay`."""


class _Rows:
    """What all leaves have: rows of which some may be another process's."""

    def _hold(self, rows: int, columns: int, own: slice | None) -> None:
        self.all_rows, self.columns, self.shared = rows, columns, own is not None
        self.own = slice(0, rows) if own is None else own
        self.rows = self.own.stop - self.own.start


class CodesLeaf(_Rows):
    """A trainable low-bit weight."""

    needs_noise = True

    def __init__(self, name: str, parameter: CodesParameter, own: slice | None = None):
        self.name, self.parameter = name, parameter
        self.packed = parameter.packed
        self.grid = grid_of(self.packed.scheme.bits)
        self._hold(self.packed.out_features, self.packed.in_features, own)

    def gradient(self) -> Tensor | None:
        grad = self.parameter.grad
        if grad is None or isinstance(grad, RowGradient):
            return None if grad is None else grad.local
        return grad.t() if self.packed.transposed else grad

    def whole(self) -> Tensor:
        """The packed codes of all rows, int8 [all rows, bytes a row]; the weight's own memory."""
        return self.parameter.stored.detach().view(self.all_rows, -1)

    def bytes(self) -> Tensor:
        """Those of the own rows, [R, bytes a row]."""
        return self.whole()[self.own]

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point of the own rows; one for the whole tensor where there is one."""
        held = (self.parameter.scale, self.parameter.zero_point)
        return tuple(t if t is None or t.shape[0] != self.all_rows else t[self.own] for t in held)

    def codes(self, rows: slice = slice(None)) -> Tensor:
        """int8 [R, K] of some rows."""
        return unpack(self.bytes()[rows], self.grid, self.columns)

    def weight_rms(self) -> float:
        return float(self.layer().norm(2)) / max(self.rows * self.columns, 1) ** 0.5

    def layer(self) -> Tensor:
        return dequantize(self.codes(), *self.scales(), self.packed.scheme.block)

    def move(self, rows: slice, step: Tensor, decay: float, words: Tensor | None) -> Moved:
        scale, zero_point = self.scales()
        group, theirs = self.packed.scheme.block, slice(None) if scale.shape[0] == 1 else rows
        scale = expand_groups(scale[theirs].to(torch.float32).reciprocal(), self.columns, group)
        codes = self.codes(rows)
        step.mul_(scale)
        if decay:
            values = codes.to(torch.float32)
            if zero_point is not None:
                values.sub_(expand_groups(zero_point[theirs], self.columns, group))
            # a product and a difference, each rounded, as everywhere on the way to a code (functional/update.py)
            step.sub_(values.mul_(decay))
        levels = round_step(step, uniform(words))
        moved = apply_step(codes, levels, self.grid)
        packed = moved if self.grid.field_bits == 8 else pack(moved, self.grid)
        self.bytes()[rows] = packed
        asked = levels.abs_().clamp_(max=self.grid.levels).sum(dtype=torch.float64)
        return Moved(int(torch.count_nonzero(codes.bitwise_xor_(moved))), float(asked))

    def saturated(self) -> int:
        """Codes at the edges of the grid, of all rows."""
        codes = unpack(self.whole(), self.grid, self.columns)
        return int(torch.count_nonzero((codes == self.grid.qmin) | (codes == self.grid.qmax)))


class ScaleLeaf(_Rows):
    """A learned scale; its gradient is that of its logarithm (`functional/trainable.py`)."""

    def __init__(self, name: str, parameter: Tensor):
        self.name, self.parameter = name, parameter
        self._hold(*parameter.shape, None)
        self.needs_noise = parameter.dtype == torch.bfloat16

    def gradient(self) -> Tensor | None:
        return self.parameter.grad

    def weight_rms(self) -> float:
        # of the logarithm only relative steps make sense
        return 1.0

    def layer(self) -> Tensor:
        return torch.ones(self.rows, self.columns, device=self.parameter.device)

    def move(self, rows: slice, step: Tensor, decay: float, words: Tensor | None) -> Moved:
        part = self.parameter.detach()[rows]
        moved = part.to(torch.float32).mul_(step.exp_())
        part.copy_(to_bfloat16(moved, words) if self.needs_noise else moved)
        return Moved()


class FloatLeaf(_Rows):
    """An ordinary parameter. bfloat16 ones are rounded stochastically, so that small steps are not lost."""

    def __init__(self, name: str, parameter: Tensor, own: slice | None = None):
        self.name, self.parameter = name, parameter
        shape = parameter.shape
        columns = shape[-1] if len(shape) else 1
        self._hold(parameter.numel() // max(columns, 1), columns, own)
        self.needs_noise = parameter.dtype == torch.bfloat16
        # biases and the weights of norms stay at the plain rate of a layer-wise rule
        self.adapted = len(shape) > 1

    def gradient(self) -> Tensor | None:
        grad = self.parameter.grad
        if grad is None or isinstance(grad, RowGradient):
            return None if grad is None else grad.local
        return grad.reshape(self.all_rows, self.columns)

    def whole(self) -> Tensor:
        """[all rows, K], the parameter's own memory; it must be contiguous."""
        return self.parameter.detach().view(self.all_rows, self.columns)

    def weight_rms(self) -> float:
        norm = self.parameter.detach().to(torch.float32).norm(2)
        return float(norm) / max(self.parameter.numel(), 1) ** 0.5

    def layer(self) -> Tensor | None:
        return self.parameter.detach().float().reshape(self.rows, self.columns) if self.adapted else None

    def move(self, rows: slice, step: Tensor, decay: float, words: Tensor | None) -> Moved:
        whole = self.parameter.detach()
        if not whole.is_contiguous():
            # a convolution in another memory format: rows are not views of it
            dense = FloatLeaf(self.name, whole.contiguous())
            dense.move(rows, step, decay, words)
            whole.copy_(dense.parameter)
            return Moved()
        part = self.whole()[self.own][rows]
        if self.needs_noise:
            moved = part.to(torch.float32).mul_(1 - decay).add_(step)
            part.copy_(to_bfloat16(moved, words))
        else:
            part.mul_(1 - decay).add_(step)
        return Moved()


def make_leaf(name: str, parameter: Tensor, shards: Shards | None = None) -> Leaf:
    """The leaf for a parameter, by what it is. Of `shards` it holds its own rows, where sharing pays: learned scales,
    vectors and small matrices stay whole."""
    if isinstance(parameter, CodesParameter):
        return CodesLeaf(name, parameter, shards and shards.own(parameter.packed.out_features))
    if getattr(parameter, "_hf_lowbit_scale", False):
        return ScaleLeaf(name, parameter)
    leaf = FloatLeaf(name, parameter)
    if shards and leaf.adapted and parameter.is_contiguous() and parameter.numel() >= SMALLEST_SHARED:
        return FloatLeaf(name, parameter, shards.own(leaf.all_rows))
    return leaf
