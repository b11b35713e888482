"""The product with low-bit live blocks, y = x W^T + bias: an operator with its reference in torch.

Blocks lie as in `blocks.py`, their codes and scales as in `block_codes.py`. With c(b) the column of block b:

    float:   y_r[m, i] = sum_{b: r(b) = r} sum_k x_{c(b)}[m, k] V_b[i, k],      V = s q rounded to x's dtype
    int8:    y_r[m, i] = t[m] sum_{b: r(b) = r} s_b[i] sum_k a_{c(b)}[m, k] q_b[i, k],      x = t a by `linear.py`

The inner sum of the second is an exact integer; its product with the scale is rounded to float32, and added in the order
of the blocks. That leaves no freedom: every kernel gives the same bits. Codes take no gradient; x does, as if W were
the float weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .block_codes import dequantize_blocks
from .block_dispatch import BlockProblem, choose_blocks
from .blocks import block_rows, gather_input, reference_block_linear, transpose_blocks
from .grid import grid_of
from .linear import quantize_activations
from .packing import unpack
from .rows import BITS, FIELD


_library = torch.library.Library("hf_lowbit", "FRAGMENT")
_library.define(
    "block_code_linear(Tensor x, Tensor stored, Tensor scale, Tensor col_indices, Tensor? row_pointers, "
    "int field, int width, bool int8_activations) -> Tensor"
)


def block_code_linear(
    x: Tensor,
    stored: Tensor,
    scale: Tensor,
    col_indices: Tensor,
    bias: Tensor | None,
    in_features: int,
    bits: str | int,
    width: int,
    row_pointers: Tensor | None = None,
    int8_activations: bool = False,
) -> Tensor:
    """y [..., NB * bn] in x's dtype for x [..., K] float and packed codes int8 [..., bn, R] of blocks `width` wide.

    `int8_activations` rounds each row of x to 8 bits first. Otherwise as `blocks.block_linear`, errors included.
    """
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return block_code_linear(
                x.to(dtype), stored, scale, col_indices, bias, in_features, bits, width, row_pointers, int8_activations
            )
    if not x.is_floating_point():
        raise TypeError(f"Expected floating-point activations. Got {x.dtype}.")
    if x.shape[-1] != in_features:
        raise ValueError(f"Expected {in_features} input features. Got {x.shape[-1]}.")
    y = torch.ops.hf_lowbit.block_code_linear(
        x.reshape(-1, in_features), stored, scale, col_indices, row_pointers, FIELD[bits], width, int8_activations
    )
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.view(*x.shape[:-1], y.shape[-1])


def reference_block_code_linear(
    x: Tensor,
    stored: Tensor,
    scale: Tensor,
    col_indices: Tensor,
    row_pointers: Tensor | None,
    bits: str | int,
    width: int,
    int8_activations: bool,
) -> Tensor:
    """The definition: x [M, K] -> y [M, NB * bn]."""
    if not int8_activations:
        values = dequantize_blocks(stored, scale, bits, width, x.dtype)
        return reference_block_linear(x, values, col_indices, row_pointers, x.shape[1])
    a, token_scale = quantize_activations(x)
    height, count, rows = stored.shape[-2], block_rows(stored, row_pointers), x.shape[0]
    codes = unpack(stored, grid_of(bits), width).reshape(-1, height, width).to(torch.float32)
    # sums of integers below 2^24, whatever the order: 127 * 128 * 512
    exact = torch.bmm(gather_input(a.to(torch.float32), col_indices, width), codes.transpose(1, 2))
    parts = exact * scale.reshape(-1, 1, height).to(torch.float32)
    first = torch.arange(count, device=x.device) * (0 if row_pointers is not None else stored.shape[1])
    lengths = torch.full_like(first, 0 if row_pointers is not None else stored.shape[1])
    if row_pointers is not None:
        first, lengths = row_pointers[:-1].long(), row_pointers.diff().long()
    y = parts.new_zeros(count, rows, height)
    for i in range(int(lengths.max()) if count else 0):
        longer = lengths > i
        y[longer] += parts[first[longer] + i]
    y = y.transpose(0, 1).reshape(rows, count * height)
    return (y * token_scale).to(x.dtype)


def problem_of(
    x: Tensor, stored: Tensor, row_pointers: Tensor | None, bits: str | int, width: int, int8_activations: bool
) -> BlockProblem:
    """Describe a call for `choose_blocks`: x [M, K]."""
    return BlockProblem(
        stored.shape[-2], width, block_rows(stored, row_pointers), x.shape[1], x.shape[0], x.dtype, x.device.type,
        bits, int8_activations,
    )  # fmt: skip


def _run(x, stored, scale, col_indices, row_pointers, field, width, int8_activations):
    bits = BITS[field]
    problem = problem_of(x, stored, row_pointers, bits, width, int8_activations)
    kernel = choose_blocks(problem)
    if kernel is None and not int8_activations:
        # there may be a kernel for the numbers
        values = dequantize_blocks(stored, scale, bits, width, x.dtype)
        return torch.ops.hf_lowbit.block_linear(x, values, col_indices, row_pointers, x.shape[1])
    if kernel is None:
        return reference_block_code_linear(x, stored, scale, col_indices, row_pointers, bits, width, int8_activations)
    pointers = None if row_pointers is None else row_pointers.contiguous()
    return kernel.run(x, stored.contiguous(), col_indices.contiguous(), pointers, problem, scale.contiguous())


def _meta(x, stored, scale, col_indices, row_pointers, field, width, int8_activations):
    return x.new_empty(x.shape[0], block_rows(stored, row_pointers) * stored.shape[-2])


def _save(ctx, inputs, output):
    x, stored, scale, columns, pointers, ctx.field, ctx.width, _ = inputs
    ctx.in_features = x.shape[1]
    ctx.save_for_backward(stored, scale, columns, pointers)


def _backward(ctx, gradient):
    stored, scale, columns, pointers = ctx.saved_tensors
    grad_x = None
    if ctx.needs_input_grad[0]:
        values = dequantize_blocks(stored, scale, BITS[ctx.field], ctx.width, gradient.dtype)
        transposed = transpose_blocks(values, columns, pointers, -(-ctx.in_features // ctx.width))
        grad_x = torch.ops.hf_lowbit.block_linear(gradient, *transposed, gradient.shape[1])[:, : ctx.in_features]
    return grad_x, None, None, None, None, None, None, None


_library.impl("block_code_linear", _run, "CompositeExplicitAutograd")
torch.library.register_fake("hf_lowbit::block_code_linear", _meta, lib=_library)
torch.library.register_autograd("hf_lowbit::block_code_linear", _backward, setup_context=_save, lib=_library)
