"""The product with the live blocks of a weight, y = x W^T + bias: an operator with its reference in torch.

W [N, K] in blocks of bn x bk, padded with zeros up to whole blocks. `values` hold the live ones, `col_indices` int32
their block columns, ascending within a block row:

    row-balanced   values [NB, L, bn, bk], col_indices [NB, L]: every block row has L live blocks
    unbalanced     values [nnz, bn, bk], col_indices [nnz], and row_pointers int32 [NB + 1]

With c(b) and r(b) the column and row of block b, and x_c the c-th slice of x, bk wide:

    y_r  = sum_{b: r(b) = r} x_{c(b)} V_b^T
    dx_c = sum_{b: c(b) = c} dy_{r(b)} V_b          dV_b = dy_{r(b)}^T x_{c(b)}

so dx is the same product with the transposed blocks, sorted by column. A kernel (`block_dispatch.py`) runs it, or
torch as below. Sums over blocks are taken in float32. Storage is two or three plain tensors, never a torch sparse
tensor: those have no bfloat16, no gradient to the input and no copy on CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .block_dispatch import FEW_ROWS, BlockProblem, choose_blocks, rebuilds


_library = torch.library.Library("hf_lowbit", "FRAGMENT")
_library.define(
    "block_linear(Tensor x, Tensor values, Tensor col_indices, Tensor? row_pointers, int in_features) -> Tensor"
)
_library.define(
    "block_gradient(Tensor gradient, Tensor x, Tensor col_indices, Tensor? row_pointers, int height, int width) "
    "-> Tensor"
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


def gather_rows(x: Tensor, col_indices: Tensor, width: int) -> Tensor:
    """x [M, K], columns [NB, L] -> what each block row is multiplied with [NB, M, L * bk]."""
    x = F.pad(x, (0, -x.shape[1] % width)).unflatten(1, (-1, width))
    return x.index_select(1, col_indices.reshape(-1).long()).unflatten(1, col_indices.shape).flatten(2).transpose(0, 1)


def reference_block_linear(
    x: Tensor, values: Tensor, col_indices: Tensor, row_pointers: Tensor | None, in_features: int
) -> Tensor:
    """The definition: x [M, K] -> y [M, NB * bn]."""
    count, (height, width), rows = block_rows(values, row_pointers), values.shape[-2:], x.shape[0]
    wide = torch.promote_types(x.dtype, torch.float32)
    if row_pointers is None and rows > FEW_ROWS:
        # one product per block row: [M, L * bk] x [L * bk, bn]
        right = values.transpose(2, 3).reshape(count, -1, height)
        y = torch.bmm(gather_rows(x, col_indices, width), right)
    else:
        slices = gather_input(x, col_indices, width)
        parts = torch.bmm(slices, values.reshape(-1, height, width).transpose(1, 2))
        if row_pointers is None:
            y = parts.view(count, values.shape[1], rows, height).sum(1, dtype=wide)
        else:
            y = x.new_zeros(count, rows, height, dtype=wide)
            y.index_add_(0, rows_of_blocks(values, row_pointers), parts.to(wide))
    return y.transpose(0, 1).reshape(rows, count * height).to(x.dtype)


def dense_of(values: Tensor, col_indices: Tensor, row_pointers: Tensor | None, in_features: int) -> Tensor:
    """W [NB * bn, K], zeros in dead blocks."""
    count, (height, width) = block_rows(values, row_pointers), values.shape[-2:]
    dense = values.new_zeros(count, height, -(-in_features // width), width)
    at = rows_of_blocks(values, row_pointers), col_indices.reshape(-1).long()
    dense.transpose(1, 2)[at] = values.reshape(-1, height, width)
    return dense.view(count * height, -1)[:, :in_features]


def transpose_blocks(
    values: Tensor, col_indices: Tensor, row_pointers: Tensor | None, block_columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The unbalanced storage of W^T [KB * bk, NB * bn]: values [nnz, bk, bn], their columns and row pointers."""
    columns = col_indices.reshape(-1)
    # stable: columns ascend within each row of W^T
    order = columns.argsort(stable=True)
    ends = torch.searchsorted(columns[order], torch.arange(block_columns, device=columns.device), right=True)
    moved = values.reshape(-1, *values.shape[-2:]).index_select(0, order).transpose(1, 2).contiguous()
    return moved, rows_of_blocks(values, row_pointers)[order].int(), F.pad(ends.int(), (1, 0))


def problem_of(x: Tensor, values: Tensor, row_pointers: Tensor | None) -> BlockProblem:
    """Describe a call for `choose_blocks`: x [M, K]."""
    height, width = values.shape[-2:]
    count = block_rows(values, row_pointers)
    blocks = max(count * -(-x.shape[1] // width), 1)
    return BlockProblem(
        height, width, count, x.shape[1], x.shape[0], x.dtype, x.device.type,
        sparsity=1 - values.shape[:-2].numel() / blocks,
    )  # fmt: skip


def _run(x, values, col_indices, row_pointers, in_features):
    problem = problem_of(x, values, row_pointers)
    kernel = choose_blocks(problem)
    if kernel is None and rebuilds(problem):
        return F.linear(x, dense_of(values, col_indices, row_pointers, in_features))
    if kernel is None:
        return reference_block_linear(x, values, col_indices, row_pointers, in_features)
    pointers = None if row_pointers is None else row_pointers.contiguous()
    return kernel.run(x, values.contiguous(), col_indices.contiguous(), pointers, problem, None)


def _meta(x, values, col_indices, row_pointers, in_features):
    return x.new_empty(x.shape[0], block_rows(values, row_pointers) * values.shape[-2])


def _save(ctx, inputs, output):
    x, values, col_indices, row_pointers, ctx.in_features = inputs
    ctx.save_for_backward(x, values, col_indices, row_pointers)


def grad_input(
    gradient: Tensor, values: Tensor, col_indices: Tensor, row_pointers: Tensor | None, in_features: int
) -> Tensor:
    """dx [M, K] of dy [M, NB * bn]."""
    transposed = transpose_blocks(values, col_indices, row_pointers, -(-in_features // values.shape[-1]))
    return torch.ops.hf_lowbit.block_linear(gradient, *transposed, gradient.shape[1])[:, :in_features]


def _backward(ctx, gradient):
    x, values, columns, pointers = ctx.saved_tensors
    height, width = values.shape[-2:]
    grad_x = grad_values = None
    if ctx.needs_input_grad[0]:
        grad_x = grad_input(gradient, values, columns, pointers, ctx.in_features)
    if ctx.needs_input_grad[1]:
        # the operator, since torch.compile traces through here
        grad_values = torch.ops.hf_lowbit.block_gradient(gradient, x, columns, pointers, height, width)
    return grad_x, grad_values, None, None, None


def reference_block_gradient(
    gradient: Tensor, x: Tensor, col_indices: Tensor, row_pointers: Tensor | None, height: int, width: int
) -> Tensor:
    """dV of the blocks at `col_indices`: gradient [M, NB * bn], x [M, K]."""
    outputs = gradient.unflatten(1, (-1, height)).transpose(0, 1)
    if row_pointers is None:
        grad = torch.bmm(outputs.transpose(1, 2), gather_rows(x, col_indices, width))
        return grad.unflatten(2, (-1, width)).transpose(1, 2).contiguous()
    outputs = outputs.index_select(0, rows_of_blocks(col_indices, row_pointers))
    return torch.bmm(outputs.transpose(1, 2), gather_input(x, col_indices, width))


def _run_gradient(gradient, x, col_indices, row_pointers, height, width):
    problem = BlockProblem(height, width, gradient.shape[1] // height, x.shape[1], x.shape[0], x.dtype, x.device.type)
    kernel = choose_blocks(problem)
    if kernel is None or kernel.gradient is None:
        return reference_block_gradient(gradient, x, col_indices, row_pointers, height, width)
    pointers = None if row_pointers is None else row_pointers.contiguous()
    return kernel.gradient(gradient, x, col_indices.contiguous(), pointers, problem)


def _meta_gradient(gradient, x, col_indices, row_pointers, height, width):
    return x.new_empty(*col_indices.shape, height, width)


_library.impl("block_gradient", _run_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("hf_lowbit::block_gradient", _meta_gradient, lib=_library)


_library.impl("block_linear", _run, "CompositeExplicitAutograd")
torch.library.register_fake("hf_lowbit::block_linear", _meta, lib=_library)
torch.library.register_autograd("hf_lowbit::block_linear", _backward, setup_context=_save, lib=_library)
