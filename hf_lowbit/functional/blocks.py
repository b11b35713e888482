"""The product with the live blocks of a weight, y = x W^T + bias: an operator with its reference in torch.

W [N, K] in blocks of bn x bk, padded with zeros up to whole blocks. `values` hold the live ones, `col_indices` int32
their block columns, ascending within a block row:

    row-balanced   values [NB, L, bn, bk], col_indices [NB, L]: every block row has L live blocks
    unbalanced     values [nnz, bn, bk], col_indices [nnz], and row_pointers int32 [NB + 1]

With c(b) and r(b) the column and row of block b, and x_c the c-th slice of x, bk wide:

    y_r  = sum_{b: r(b) = r} x_{c(b)} V_b^T
    dx_c = sum_{b: c(b) = c} dy_{r(b)} V_b          dV_b = dy_{r(b)}^T x_{c(b)}

Sums over blocks are taken in float32. Storage is two or three plain tensors, never a torch sparse tensor: those have
no bfloat16, no gradient to the input and no copy on CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


# up to so many rows of x the values are read as they lie; from there on one copy in the order of the product pays
FEW_ROWS = 16

_library = torch.library.Library("hf_lowbit", "FRAGMENT")
_library.define(
    "block_linear(Tensor x, Tensor values, Tensor col_indices, Tensor? row_pointers, int in_features) -> Tensor"
)


def block_linear(
    x: Tensor,
    values: Tensor,
    col_indices: Tensor,
    bias: Tensor | None,
    in_features: int,
    row_pointers: Tensor | None = None,
) -> Tensor:
    """y [..., NB * bn] in x's dtype for x [..., K] float; gradients to x, values and bias.

    Where blocks reach over the edge, the last outputs are zero (plus bias, which then has NB * bn entries). Under
    autocast x and the values take autocast's dtype first. Raises TypeError for integers, ValueError for other sizes.
    """
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return block_linear(x.to(dtype), values.to(dtype), col_indices, bias, in_features, row_pointers)
    if not x.is_floating_point():
        raise TypeError(f"Expected floating-point activations. Got {x.dtype}.")
    if x.shape[-1] != in_features:
        raise ValueError(f"Expected {in_features} input features. Got {x.shape[-1]}.")
    rows = x.reshape(-1, in_features)
    y = torch.ops.hf_lowbit.block_linear(rows, values.to(x.dtype), col_indices, row_pointers, in_features)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.view(*x.shape[:-1], y.shape[-1])


def gather_blocks(dense: Tensor, col_indices: Tensor, block: tuple[int, int]) -> Tensor:
    """The blocks [NB, L, bn, bk] at `col_indices` [NB, L] of `dense` [N, K]."""
    rows, columns = dense.shape
    dense = F.pad(dense, (0, -columns % block[1], 0, -rows % block[0]))
    view = dense.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).transpose(1, 2)
    index = torch.arange(view.shape[0], device=dense.device)[:, None]
    return view[index, col_indices.long()]


def scatter_blocks(values: Tensor, col_indices: Tensor, shape: tuple[int, int]) -> Tensor:
    """The reverse of `gather_blocks`: dense [N, K] of `shape`, zeros elsewhere."""
    block = values.shape[-2:]
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    dense = values.new_zeros(*grid, *block)
    dense[torch.arange(grid[0], device=values.device)[:, None], col_indices.long()] = values
    return dense.transpose(1, 2).flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]].contiguous()


def block_rows(values: Tensor, row_pointers: Tensor | None) -> int:
    """NB."""
    return values.shape[0] if row_pointers is None else row_pointers.shape[0] - 1


def rows_of_blocks(values: Tensor, row_pointers: Tensor | None) -> Tensor:
    """The block row of each block, int64 [NB * L] or [nnz]."""
    if row_pointers is None:
        return torch.arange(values.shape[0], device=values.device).repeat_interleave(values.shape[1])
    index = torch.arange(values.shape[0], device=values.device)
    return torch.searchsorted(row_pointers.long(), index, right=True) - 1


def gather_input(x: Tensor, col_indices: Tensor, width: int) -> Tensor:
    """x [M, K] -> the slice of each block [NB * L or nnz, M, bk]."""
    x = F.pad(x, (0, -x.shape[1] % width))
    return x.unflatten(1, (-1, width)).transpose(0, 1).index_select(0, col_indices.reshape(-1).long())


def reference_block_linear(
    x: Tensor, values: Tensor, col_indices: Tensor, row_pointers: Tensor | None, in_features: int
) -> Tensor:
    """The definition: x [M, K] -> y [M, NB * bn]."""
    count, (height, width), rows = block_rows(values, row_pointers), values.shape[-2:], x.shape[0]
    slices = gather_input(x, col_indices, width)
    if row_pointers is None and rows > FEW_ROWS:
        # one product per block row: [M, L * bk] x [L * bk, bn]
        live = values.shape[1]
        left = slices.view(count, live, rows, width).transpose(1, 2).reshape(count, rows, live * width)
        right = values.transpose(1, 2).reshape(count, height, live * width)
        y = torch.bmm(left, right.transpose(1, 2))
    else:
        parts = torch.bmm(slices, values.reshape(-1, height, width).transpose(1, 2))
        if row_pointers is None:
            y = parts.view(count, values.shape[1], rows, height).sum(
                1, dtype=None if x.dtype == torch.float64 else torch.float32
            )
        else:
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            y = x.new_zeros(count, rows, height, dtype=wide)
            y.index_add_(0, rows_of_blocks(values, row_pointers), parts.to(wide))
    return y.transpose(0, 1).reshape(rows, count * height).to(x.dtype)


def _meta(x, values, col_indices, row_pointers, in_features):
    return x.new_empty(x.shape[0], block_rows(values, row_pointers) * values.shape[-2])


def _save(ctx, inputs, output):
    x, values, col_indices, row_pointers, ctx.in_features = inputs
    ctx.save_for_backward(x, values, col_indices, row_pointers)


def _backward(ctx, gradient):
    x, values, columns, pointers = ctx.saved_tensors
    (height, width), count = values.shape[-2:], block_rows(values, pointers)
    outputs = gradient.reshape(gradient.shape[0], count, height).transpose(0, 1)
    outputs = outputs.index_select(0, rows_of_blocks(values, pointers))
    grad_x = grad_values = None
    if ctx.needs_input_grad[0]:
        parts = torch.bmm(outputs, values.reshape(-1, height, width))
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        total = torch.zeros(-(-ctx.in_features // width), x.shape[0], width, dtype=wide, device=x.device)
        total = total.index_add(0, columns.reshape(-1).long(), parts.to(wide))
        grad_x = total.transpose(0, 1).flatten(1)[:, : ctx.in_features].to(x.dtype)
    if ctx.needs_input_grad[1]:
        grad_values = torch.bmm(outputs.transpose(1, 2), gather_input(x, columns, width)).view(values.shape)
    return grad_x, grad_values, None, None, None


_library.impl("block_linear", reference_block_linear, "CompositeExplicitAutograd")
torch.library.register_fake("hf_lowbit::block_linear", _meta, lib=_library)
torch.library.register_autograd("hf_lowbit::block_linear", _backward, setup_context=_save, lib=_library)
