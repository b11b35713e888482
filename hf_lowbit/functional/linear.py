"""The product with low-bit weights: y = x W^T + bias, W = s * (q - z); declared as an operator, with its reference.

Two kinds of activations:

- "float": y = x W^T with W rounded to x's dtype. This is the definition; kernels may accumulate differently.
- "int8", per token (BitNet b1.58, Ma et al. 2024, eq. 4-5): t = max|x| / 127, a = round(x / t), and

      y[m, n] = t[m] * sum_g s[n, g] * sum_{k in g} a[m, k] (q[n, k] - z[n, g])

  where the inner sums are exact integers. A row of zeros has t = 0 and gives zeros; NaN and infinity in a row give NaN
  in that row's outputs, never a number.

The operator `hf_lowbit::linear` works on 2-D x (a sliced 3-D input would take a slow path in torch, and copies), has a
meta function (torch.compile sees no graph break) and a gradient to x and bias. Gradients treat the activation
rounding as the identity (straight-through).

Shape legend: M rows of x, N out_features, K in_features, R bytes a row, G groups a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import Kernel, Problem, choose, chosen, register_kernel, remember
from .grid import dequantize, expand_groups, grid_of
from .packing import not_codes, unpack
from .rows import BITS, FIELD


_library = torch.library.Library("hf_lowbit", "DEF")
_library.define(
    "linear(Tensor x, Tensor weight, Tensor scale, Tensor? zero_point, Tensor? bias, "
    "int field, int in_features, int group_size, bool int8_activations) -> Tensor"
)


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    bits: str | int,
    in_features: int,
    group_size: int | None = None,
    int8_activations: bool = False,
) -> Tensor:
    """y = x W^T + bias for packed `weight` int8 [1, N, R] or [N, R]; x [..., K] float; returns [..., N] in x's dtype.

    Under autocast x takes autocast's dtype first, as it does in torch's linear. TypeError for a weight that is not
    int8: kernels trust it.
    """
    if weight.dtype is not torch.int8:
        raise not_codes(weight)
    device = "cpu" if x.is_cpu else x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        # float64 is left alone, as torch does; inside, autocast would round what kernels hold in float32
        x = x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return linear(x, weight, scale, zero_point, bias, bits, in_features, group_size, int8_activations)
    if type(x) is Tensor and not torch.is_grad_enabled() and not is_watched():
        return linear_now(x, weight, scale, zero_point, bias, bits, in_features, group_size, int8_activations)
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    shape, stored = x.shape, weight.shape
    y = torch.ops.hf_lowbit.linear(
        x if len(shape) == 2 else x.reshape(-1, shape[-1]), weight.view(stored[-2], stored[-1]), scale, zero_point,
        bias, FIELD[bits], in_features, group_size or 0, int8_activations,
    )  # fmt: skip
    return y if len(shape) == 2 else y.view(*shape[:-1], stored[-2])


def linear_now(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    bits: str | int,
    in_features: int,
    group_size: int | None,
    int8_activations: bool,
) -> Tensor:
    """`linear` where nothing is to be recorded or traced, and autocast is off: without the operator's dispatch, which
    costs as much as a small product."""
    shape, stored = x.shape, weight.shape
    if bias is not None and bias.dtype != x.dtype:
        # under autocast, and where a model keeps its biases in float32
        bias = bias.to(x.dtype)
    call = (
        bits, in_features, group_size, int8_activations, shape, x.dtype, x.is_cpu or x.device.type, stored[-2],
        scale.numel() == 1, zero_point is None,
    )  # fmt: skip
    known = chosen(call)
    if known is None:
        rows, flat = x.reshape(-1, shape[-1]), weight.view(stored[-2], stored[-1])
        problem = problem_of(rows, flat, scale, zero_point, bits, in_features, group_size or 0, int8_activations)
        known = choose(problem).kernel, problem
        remember(call, *known)
    kernel, problem = known
    if kernel.takes_batches:
        return kernel.run(x, weight, scale, zero_point, bias, problem)
    rows = x if len(shape) == 2 else x.reshape(-1, shape[-1])
    flat = weight if kernel.takes_stored else weight.view(stored[-2], stored[-1])
    y = kernel.run(rows, flat, scale, zero_point, bias, problem)
    return y if len(shape) == 2 else y.view(*shape[:-1], stored[-2])


def is_watched() -> bool:
    """Whether something wants to see the operators that run: torch.compile, jit.trace, a dispatch mode, functorch."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token int8: codes int8 [M, K] and t float32 [M, 1], with x = t * codes up to rounding."""
    x = x.to(torch.float32)
    largest = x.abs().amax(dim=-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    # a row of zeros has the codes 0, and so has one whose inverse overflows
    inverse = largest.reciprocal().mul_(127.0).nan_to_num_(nan=0.0, posinf=0.0)
    # a NaN has no code; the row's t is NaN and decides the output
    codes = (x * inverse).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).round_()
    # largest - largest is 0, but NaN where largest is infinite
    return codes.to(torch.int8), largest.div(127.0).add_(largest - largest)


def reference_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, problem: Problem
) -> Tensor:
    """The definition, in plain torch: unpack everything, multiply, round. Kernels are tested against it."""
    codes = unpack(weight, grid_of(problem.bits), problem.in_features)
    group_size = problem.group_size or None
    if not problem.int8_activations:
        return F.linear(x, dequantize(codes, scale, zero_point, group_size, x.dtype), bias)
    a, token_scale = quantize_activations(x)
    values = codes.to(torch.float32)
    if zero_point is not None:
        values -= expand_groups(zero_point, problem.in_features, group_size).to(torch.float32)
    # products of one group are integers below 2^53: float64 sums them exactly
    y = x.new_zeros(x.shape[0], problem.out_features, dtype=torch.float32)
    size = group_size or max(problem.in_features, 1)
    for g, start in enumerate(range(0, problem.in_features, size)):
        part = slice(start, start + size)
        exact = F.linear(a[:, part].to(torch.float64), values[:, part].to(torch.float64)).to(torch.float32)
        y += exact * scale[:, min(g, scale.shape[1] - 1)].to(torch.float32)
    y *= token_scale
    return (y if bias is None else y + bias.to(torch.float32)).to(x.dtype)


def problem_of(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bits: str | int,
    in_features: int,
    group_size: int,
    int8_activations: bool,
) -> Problem:
    """Describe a call for `choose`. Raises ValueError when x has another width than the weight: kernels trust it."""
    if not x.is_floating_point():
        raise TypeError(f"Expected floating-point activations. Got {x.dtype}.")
    if x.shape[1] != in_features:
        raise ValueError(f"Expected {in_features} input features. Got {x.shape[1]}.")
    return Problem(
        bits,
        group_size,
        scale.numel() == 1,
        zero_point is not None,
        int8_activations,
        weight.shape[0],
        in_features,
        x.shape[0],
        x.dtype,
        x.device.type,
    )


def _run(x, weight, scale, zero_point, bias, field, in_features, group_size, int8_activations):
    problem = problem_of(x, weight, scale, zero_point, BITS[field], in_features, group_size, int8_activations)
    return choose(problem).kernel.run(x, weight, scale, zero_point, bias, problem)


def _meta(x, weight, scale, zero_point, bias, field, in_features, group_size, int8_activations):
    torch._check(x.shape[1] == in_features, lambda: f"Expected {in_features} input features. Got {x.shape[1]}.")
    return x.new_empty(x.shape[0], weight.shape[0])


def _save(ctx, inputs, output):
    _, weight, scale, zero_point, bias, ctx.field, ctx.in_features, ctx.group_size, _ = inputs
    ctx.has_bias = bias is not None
    ctx.bias_dtype = bias.dtype if ctx.has_bias else None
    ctx.save_for_backward(weight, scale, zero_point)


def _backward(ctx, grad):
    weight, scale, zero_point = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        # the operator, since torch.compile traces through here
        grad_x = grad @ torch.ops.hf_lowbit.rows(
            weight, scale, zero_point, None, ctx.field, ctx.in_features, ctx.group_size, grad.dtype
        )
    if ctx.has_bias and ctx.needs_input_grad[4]:
        grad_bias = grad.sum(0).to(ctx.bias_dtype)
    return grad_x, None, None, None, grad_bias, None, None, None, None


_library.impl("linear", _run, "CompositeExplicitAutograd")
torch.library.register_fake("hf_lowbit::linear", _meta, lib=_library)
torch.library.register_autograd("hf_lowbit::linear", _backward, setup_context=_save, lib=_library)
register_kernel(Kernel("reference", 0, lambda problem: None, reference_linear))
