"""Products of many experts with live blocks, in one call: y[i] = x[i] W[e(i)]^T, rows of x sorted by expert.

Expert e owns the rows [offsets[e], offsets[e + 1]) of x; rows that no expert owns give zeros. Blocks of all experts
lie as those of one weight in `blocks.py`, with the experts' block rows one after the other:

    row-balanced   values [E, NB, L, bn, bk], col_indices [E, NB, L]
    unbalanced     values [nnz, bn, bk], col_indices [nnz], and row_pointers int32 [E * NB + 1]

and so do low-bit ones, as `block_codes.py` has them. Each expert's product, and its gradients, are those of the
operators `block_linear`, `block_gradient` and `block_code_linear` on its rows and its blocks; experts without rows are
not touched, and their blocks get a gradient of zero. Shapes do not depend on how tokens are routed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .block_codes import dequantize_blocks
from .blocks import grad_input
from .experts import segments
from .rows import BITS, FIELD


_library = torch.library.Library("hf_lowbit", "FRAGMENT")
_BLOCKS = "Tensor col_indices, Tensor? row_pointers"
_library.define(f"block_experts(Tensor x, Tensor offsets, Tensor values, {_BLOCKS}, int in_features) -> Tensor")
_library.define(
    f"block_experts_input(Tensor gradient, Tensor offsets, Tensor values, {_BLOCKS}, int in_features) -> Tensor"
)
_library.define(
    f"block_experts_gradient(Tensor gradient, Tensor offsets, Tensor x, {_BLOCKS}, int height, int width) -> Tensor"
)
_library.define(
    f"block_code_experts(Tensor x, Tensor offsets, Tensor stored, Tensor scale, {_BLOCKS}, int field, int width, "
    "bool int8_activations) -> Tensor"
)


def block_experts(
    x: Tensor, offsets: Tensor, values: Tensor, col_indices: Tensor, row_pointers: Tensor | None, in_features: int
) -> Tensor:
    """y [S, NB * bn] in x's dtype for x [S, K] float and offsets int64 [E + 1] ascending within [0, S].

    Gradients to x and values. Under autocast x and the values take autocast's dtype first. Raises TypeError for
    integers, ValueError for other sizes.
    """
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    _check(x, in_features)
    with torch.autocast(device, enabled=False):
        return torch.ops.hf_lowbit.block_experts(
            x, offsets, values.to(x.dtype), col_indices, row_pointers, in_features
        )


def block_code_experts(
    x: Tensor,
    offsets: Tensor,
    stored: Tensor,
    scale: Tensor,
    col_indices: Tensor,
    row_pointers: Tensor | None,
    in_features: int,
    bits: str | int,
    width: int,
    int8_activations: bool = False,
) -> Tensor:
    """As `block_experts` for packed codes int8 [..., bn, R] of blocks `width` wide, which take no gradient; x does."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    _check(x, in_features)
    with torch.autocast(device, enabled=False):
        return torch.ops.hf_lowbit.block_code_experts(
            x, offsets, stored, scale, col_indices, row_pointers, FIELD[bits], width, int8_activations
        )


def _check(x: Tensor, in_features: int) -> None:
    if not x.is_floating_point():
        raise TypeError(f"Expected floating-point activations. Got {x.dtype}.")
    if x.ndim != 2 or x.shape[1] != in_features:
        raise ValueError(f"Expected rows of {in_features} input features. Got x {tuple(x.shape)}.")


def rows_each(offsets: Tensor, col_indices: Tensor, row_pointers: Tensor | None) -> int:
    """NB, the block rows of one expert."""
    experts = offsets.shape[0] - 1
    return col_indices.shape[1] if row_pointers is None else (row_pointers.shape[0] - 1) // experts


def used_blocks(
    offsets: Tensor, col_indices: Tensor, row_pointers: Tensor | None
) -> Iterator[tuple[slice, int | slice, Tensor | None]]:
    """(its rows of x, where its blocks lie, its row pointers) for each expert that has rows."""
    count = rows_each(offsets, col_indices, row_pointers)
    ends = None if row_pointers is None else row_pointers[::count].tolist()
    for expert, own in segments(offsets):
        if ends is None:
            yield own, expert, None
        else:
            pointers = row_pointers[expert * count : (expert + 1) * count + 1]
            yield own, slice(ends[expert], ends[expert + 1]), pointers - ends[expert]


def _run(x, offsets, values, col_indices, row_pointers, in_features):
    y = x.new_zeros(x.shape[0], rows_each(offsets, col_indices, row_pointers) * values.shape[-2])
    for own, at, pointers in used_blocks(offsets, col_indices, row_pointers):
        y[own] = torch.ops.hf_lowbit.block_linear(x[own], values[at], col_indices[at], pointers, in_features)
    return y


def _meta(x, offsets, values, col_indices, row_pointers, in_features):
    return x.new_empty(x.shape[0], rows_each(offsets, col_indices, row_pointers) * values.shape[-2])


def _run_input(gradient, offsets, values, col_indices, row_pointers, in_features):
    grad = gradient.new_zeros(gradient.shape[0], in_features)
    for own, at, pointers in used_blocks(offsets, col_indices, row_pointers):
        grad[own] = grad_input(gradient[own], values[at], col_indices[at], pointers, in_features)
    return grad


def _meta_input(gradient, offsets, values, col_indices, row_pointers, in_features):
    return gradient.new_empty(gradient.shape[0], in_features)


def _run_gradient(gradient, offsets, x, col_indices, row_pointers, height, width):
    grad = x.new_zeros(*col_indices.shape, height, width)
    for own, at, pointers in used_blocks(offsets, col_indices, row_pointers):
        grad[at] = torch.ops.hf_lowbit.block_gradient(gradient[own], x[own], col_indices[at], pointers, height, width)
    return grad


def _meta_gradient(gradient, offsets, x, col_indices, row_pointers, height, width):
    return x.new_empty(*col_indices.shape, height, width)


def _save(ctx, inputs, output):
    *tensors, ctx.in_features = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, gradient):
    x, offsets, values, columns, pointers = ctx.saved_tensors
    ops, (height, width) = torch.ops.hf_lowbit, values.shape[-2:]
    grad_x = grad_values = None
    if ctx.needs_input_grad[0]:
        grad_x = ops.block_experts_input(gradient, offsets, values, columns, pointers, ctx.in_features)
    if ctx.needs_input_grad[2]:
        grad_values = ops.block_experts_gradient(gradient, offsets, x, columns, pointers, height, width)
    return grad_x, None, grad_values, None, None, None


def _run_codes(x, offsets, stored, scale, col_indices, row_pointers, field, width, int8_activations):
    y = x.new_zeros(x.shape[0], rows_each(offsets, col_indices, row_pointers) * stored.shape[-2])
    for own, at, pointers in used_blocks(offsets, col_indices, row_pointers):
        y[own] = torch.ops.hf_lowbit.block_code_linear(
            x[own], stored[at], scale[at], col_indices[at], pointers, field, width, int8_activations
        )
    return y


def _meta_codes(x, offsets, stored, scale, col_indices, row_pointers, field, width, int8_activations):
    return x.new_empty(x.shape[0], rows_each(offsets, col_indices, row_pointers) * stored.shape[-2])


def _save_codes(ctx, inputs, output):
    x, offsets, stored, scale, columns, pointers, ctx.field, ctx.width, _ = inputs
    ctx.in_features = x.shape[1]
    ctx.save_for_backward(offsets, stored, scale, columns, pointers)


def _backward_codes(ctx, gradient):
    offsets, stored, scale, columns, pointers = ctx.saved_tensors
    grad_x = None
    if ctx.needs_input_grad[0]:
        values = dequantize_blocks(stored, scale, BITS[ctx.field], ctx.width, gradient.dtype)
        grad_x = torch.ops.hf_lowbit.block_experts_input(gradient, offsets, values, columns, pointers, ctx.in_features)
    return grad_x, *[None] * 8


for _name, _function, _fake in (
    ("block_experts", _run, _meta),
    ("block_experts_input", _run_input, _meta_input),
    ("block_experts_gradient", _run_gradient, _meta_gradient),
    ("block_code_experts", _run_codes, _meta_codes),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_lowbit::{_name}", _fake, lib=_library)
torch.library.register_autograd("hf_lowbit::block_experts", _backward, setup_context=_save, lib=_library)
torch.library.register_autograd(
    "hf_lowbit::block_code_experts", _backward_codes, setup_context=_save_codes, lib=_library
)
