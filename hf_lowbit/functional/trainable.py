"""The product with low-bit weights that are being trained: y = x W^T + bias, W = s (q - z) or its ternary form.

    dL/dx = dL/dy W,    dL/dW = dL/dy^T x,    dL/dlog(s) = s * sum over the group of dL/dW (q - z)

dL/dW arrives at `slot`, a parameter of W's shape that holds no float weights (`hf_lowbit/nn/slot.py`); W itself is
built from the codes for the product, again in the backward pass, and dropped. With a ternary form the gradient passes
its rounding unchanged, and so it does with int8 activations (straight-through; BitNet b1.58, Ma et al. 2024).

A learned scale is moved by factors, since it has to stay positive and its size is that of a level: so its gradient is
that of its logarithm, which is also of a size with the others when a global norm is clipped.

With int8 activations the numbers are those of `functional.linear`, but summed in the activations' dtype instead of in
exact integers: training is a matter of speed. Evaluation without gradients goes through `functional.linear`.

Shape legend: M rows of x, N out_features, K in_features, R bytes a row, G groups a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .coarse import sum_groups, ternary
from .grid import dequantize, expand_groups, grid_of
from .linear import quantize_activations
from .packing import unpack


class Form(NamedTuple):
    """How the stored bytes are read: grid, row length, group size (None: no groups), coarser forward, activations.

    `transposed`: the slot's gradient is [K, N], as GPT-2's Conv1D has its weight.
    """

    bits: str | int
    in_features: int
    group_size: int | None
    ternary_forward: bool
    int8_activations: bool
    transposed: bool


def trainable_linear(
    x: Tensor, slot: Tensor, stored: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, form: Form
) -> Tensor:
    """y [..., N] in x's dtype (autocast's, under autocast) for x [..., K]; stored int8 [1, N, R] or [N, R].

    Differentiable with respect to x, slot, bias and, where it requires a gradient, scale.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return trainable_linear(x, slot, stored, scale, zero_point, bias, form)
    rows = x.reshape(-1, x.shape[-1])
    bias = None if bias is None else bias.to(x.dtype)
    stored = stored.view(stored.shape[-2], stored.shape[-1])
    y = _TrainableLinear.apply(rows, slot, stored, scale, zero_point, bias, form)
    return y.view(*x.shape[:-1], y.shape[-1])


def forward_codes(
    stored: Tensor, scale: Tensor, zero_point: Tensor | None, form: Form
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes int8 [N, K], scale and zero point that the forward pass multiplies with."""
    codes = unpack(stored, grid_of(form.bits), form.in_features)
    if form.ternary_forward:
        codes, scale, _ = ternary(codes, scale, form.group_size)
        zero_point = None
    return codes, scale, zero_point


def _round_activations(x: Tensor) -> Tensor:
    codes, token_scale = quantize_activations(x)
    return (codes.to(torch.float32) * token_scale).to(x.dtype)


class _TrainableLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slot, stored, scale, zero_point, bias, form):
        ctx.form, ctx.slot_dtype = form, slot.dtype
        x = _round_activations(x) if form.int8_activations else x
        ctx.save_for_backward(x, stored, scale, zero_point)
        codes, s, z = forward_codes(stored, scale, zero_point, form)
        return F.linear(x, dequantize(codes, s, z, form.group_size, x.dtype), bias)

    @staticmethod
    def backward(ctx, grad):
        x, stored, scale, zero_point = ctx.saved_tensors
        form = ctx.form
        grad_x = grad_slot = grad_scale = grad_bias = None
        if ctx.needs_input_grad[0]:
            codes, s, z = forward_codes(stored, scale, zero_point, form)
            grad_x = grad @ dequantize(codes, s, z, form.group_size, grad.dtype)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[3]:
            grad_slot = grad.t() @ x
        if ctx.needs_input_grad[3]:
            grad_scale = _scale_gradient(grad_slot, stored, scale, zero_point, form)
        if ctx.needs_input_grad[5]:
            grad_bias = grad.sum(0)
        if not ctx.needs_input_grad[1]:
            grad_slot = None
        elif form.transposed:
            grad_slot = grad_slot.t()
        grad_slot = None if grad_slot is None else grad_slot.to(ctx.slot_dtype)
        return grad_x, grad_slot, None, grad_scale, None, grad_bias, None


def _scale_gradient(
    grad_weight: Tensor, stored: Tensor, scale: Tensor, zero_point: Tensor | None, form: Form
) -> Tensor:
    codes = unpack(stored, grid_of(form.bits), form.in_features)
    values = codes.to(torch.float32)
    if form.ternary_forward:
        t, _, mu = ternary(codes, scale, form.group_size)
        values = t.to(torch.float32) * expand_groups(mu, form.in_features, form.group_size)
    elif zero_point is not None:
        values -= expand_groups(zero_point, form.in_features, form.group_size).to(torch.float32)
    total = sum_groups(values.mul_(grad_weight), scale.shape, form.group_size)
    return total.mul_(scale.to(torch.float32)).to(scale.dtype)
