"""Two products with live blocks that lie at the same places, and what a Llama's MLP makes of them: an operator.

    h = silu(x G^T) * (x U^T),   G and U in blocks with one mask (`blocks.py`)

A kernel reads x once for both and keeps the products in registers; without one, torch multiplies twice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .block_dispatch import choose_blocks
from .blocks import grad_input, problem_of


_library = torch.library.Library("hf_lowbit", "FRAGMENT")
_library.define(
    "block_swiglu(Tensor x, Tensor gate, Tensor up, Tensor col_indices, Tensor? row_pointers, int in_features) "
    "-> Tensor"
)


def block_swiglu(
    x: Tensor, gate: Tensor, up: Tensor, col_indices: Tensor, in_features: int, row_pointers: Tensor | None = None
) -> Tensor:
    """h [..., NB * bn] in x's dtype for x [..., K] and the values of both weights, of one shape and dtype as x.

    Gradients to x and both values. Raises TypeError for integers or other dtypes, ValueError for other sizes.
    """
    if not x.is_floating_point() or not gate.dtype == up.dtype == x.dtype:
        raise TypeError(f"Expected floats of one dtype. Got x {x.dtype}, gate {gate.dtype}, up {up.dtype}.")
    if x.shape[-1] != in_features or gate.shape != up.shape:
        raise ValueError(
            f"Expected {in_features} input features and blocks of one shape. Got {x.shape[-1]}, gate "
            f"{tuple(gate.shape)}, up {tuple(up.shape)}."
        )
    rows = x.reshape(-1, in_features)
    h = torch.ops.hf_lowbit.block_swiglu(rows, gate, up, col_indices, row_pointers, in_features)
    return h.view(*x.shape[:-1], h.shape[-1])


def _products(x, gate, up, columns, pointers, in_features):
    multiply = torch.ops.hf_lowbit.block_linear
    return [multiply(x, values, columns, pointers, in_features) for values in (gate, up)]


def _run(x, gate, up, columns, pointers, in_features):
    problem = problem_of(x, gate, pointers)
    kernel = choose_blocks(problem)
    if kernel is not None and kernel.swiglu is not None:
        own = None if pointers is None else pointers.contiguous()
        return kernel.swiglu(x, gate.contiguous(), up.contiguous(), columns.contiguous(), own, problem)
    g, u = _products(x, gate, up, columns, pointers, in_features)
    return F.silu(g) * u


def _meta(x, gate, up, columns, pointers, in_features):
    return torch.ops.hf_lowbit.block_linear(x, gate, columns, pointers, in_features)


def _save(ctx, inputs, output):
    *tensors, ctx.in_features = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, gradient):
    x, gate, up, columns, pointers = ctx.saved_tensors
    height, width = gate.shape[-2:]
    # computed again: keeping both products would cost more memory than the fused forward saves time
    g, u = _products(x, gate, up, columns, pointers, ctx.in_features)
    sigmoid = torch.sigmoid(g)
    to_g, to_u = gradient * u * sigmoid * (1 + g * (1 - sigmoid)), gradient * g * sigmoid
    grads = [None, None, None]
    if ctx.needs_input_grad[0]:
        grads[0] = grad_input(to_g, gate, columns, pointers, ctx.in_features) + grad_input(
            to_u, up, columns, pointers, ctx.in_features
        )
    for i, own in ((1, to_g), (2, to_u)):
        if ctx.needs_input_grad[i]:
            grads[i] = torch.ops.hf_lowbit.block_gradient(own, x, columns, pointers, height, width)
    return *grads, None, None, None


_library.impl("block_swiglu", _run, "CompositeExplicitAutograd")
torch.library.register_fake("hf_lowbit::block_swiglu", _meta, lib=_library)
torch.library.register_autograd("hf_lowbit::block_swiglu", _backward, setup_context=_save, lib=_library)
