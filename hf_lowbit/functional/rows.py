"""Rows of a packed weight as numbers, W[n] = s * (q[n] - z), for gradients, look-ups and dense copies.

The definition unpacks and then dequantizes (`packing`, `grid`), in a dozen passes of torch. A kernel may do it in one,
and must give the same bits: the difference is an exact integer, the product is formed in float32 and rounded once.

Choosing is simpler than for products, since every way gives the same: the first kernel in order of rank that accepts,
and the definition where none does. A forced kernel (see `dispatch`) that brings rows of its own is taken alone, and
one that brings none leaves them to the definition.

Shape legend: N rows of the weight, K in_features, R bytes a row, G groups a row, I rows asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import forced_kernel
from .grid import TERNARY, dequantize, grid_of
from .packing import not_codes, unpack


# the operators' `field` argument: the bits, with 1 for ternary (operators take integers faster than strings)
FIELD = {TERNARY: 1, 2: 2, 3: 3, 4: 4, 8: 8}
BITS = {field: bits for bits, field in FIELD.items()}

_library = torch.library.Library("hf_lowbit", "FRAGMENT")
_library.define(
    "rows(Tensor weight, Tensor scale, Tensor? zero_point, Tensor? ids, int field, int in_features, int group_size, "
    "ScalarType dtype) -> Tensor"
)


class Rows(NamedTuple):
    """What a kernel may look at to accept or refuse; hashable. `group_size` 0 means no groups, as in `Problem`."""

    bits: str | int
    group_size: int
    per_tensor: bool
    asymmetric: bool
    out_features: int
    in_features: int
    scale_dtype: torch.dtype
    ids_dtype: torch.dtype | None
    dtype: torch.dtype
    device: str


class RowKernel(NamedTuple):
    """One implementation. `refuse(rows)` returns None to accept or a sentence that says why not.

    `run(weight, scale, zero_point, ids, rows)` gets weight int8 [N, R], scale and zero_point [N, G], [N, 1] or [1, 1],
    ids integers [I] or None for all rows, and returns [I, K] or [N, K]. Ids outside the weight raise IndexError.
    """

    name: str
    rank: int
    refuse: Callable[[Rows], str | None]
    run: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Rows], Tensor]


_kernels: list[RowKernel] = []
_choices: dict[tuple, RowKernel] = {}


def register_rows(kernel: RowKernel) -> None:
    """Add an implementation, or replace the one of the same name."""
    _kernels[:] = sorted([k for k in _kernels if k.name != kernel.name] + [kernel], key=lambda k: -k.rank)
    _choices.clear()


def rows_of(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    ids: Tensor | None,
    bits: str | int,
    in_features: int,
    group_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Rows `ids` (integers [I], or None for all) of packed `weight` int8 [N, R], [I, K] in `dtype`. No gradient."""
    plain = type(weight) in (Tensor, torch.nn.Parameter) and (ids is None or type(ids) is Tensor)
    if plain and not torch.compiler.is_compiling():
        # nothing to record or trace: the operator's dispatch costs as much as a row
        return _rows(weight, scale, zero_point, ids, bits, in_features, group_size or 0, dtype)
    return torch.ops.hf_lowbit.rows(
        weight, scale, zero_point, ids, FIELD[bits], in_features, group_size or 0, dtype
    )  # fmt: skip


def choose_rows(rows: Rows) -> RowKernel:
    """The kernel that runs."""
    key = rows, forced_kernel()
    kernel = _choices.get(key)
    if kernel is None:
        named = [k for k in _kernels if k.name == key[1]] if key[1] else _kernels
        kernel = next((k for k in named if k.refuse(rows) is None), None) or _DEFINITION
        _choices[key] = kernel
    return kernel


def reference_rows(weight: Tensor, scale: Tensor, zero_point: Tensor | None, ids: Tensor | None, rows: Rows) -> Tensor:
    """The definition, in plain torch."""
    if ids is not None:
        weight = weight.index_select(0, ids)
        if not rows.per_tensor:
            scale = scale.index_select(0, ids)
            zero_point = None if zero_point is None else zero_point.index_select(0, ids)
    codes = unpack(weight, grid_of(rows.bits), rows.in_features)
    return dequantize(codes, scale, zero_point, rows.group_size or None, rows.dtype)


def _rows(weight, scale, zero_point, ids, bits, in_features, group_size, dtype):
    if weight.dtype is not torch.int8:
        raise not_codes(weight)
    rows = Rows(
        bits, group_size, scale.shape[0] == 1, zero_point is not None,
        weight.shape[0], in_features, scale.dtype, None if ids is None else ids.dtype, dtype, weight.device.type,
    )  # fmt: skip
    return choose_rows(rows).run(weight, scale, zero_point, ids, rows)


def _operator(weight, scale, zero_point, ids, field, in_features, group_size, dtype):
    return _rows(weight, scale, zero_point, ids, BITS[field], in_features, group_size, dtype)


def _meta(weight, scale, zero_point, ids, field, in_features, group_size, dtype):
    return weight.new_empty(weight.shape[0] if ids is None else ids.shape[0], in_features, dtype=dtype)


_DEFINITION = RowKernel("reference", 0, lambda rows: None, reference_rows)
_library.impl("rows", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("hf_lowbit::rows", _meta, lib=_library)
register_rows(_DEFINITION)
