"""Products of many experts in one call: y[i] = x[i] W[e(i)]^T + bias[e(i)], rows of x sorted by expert.

Expert e owns the rows [offsets[e], offsets[e + 1]) of x; rows that no expert owns give zeros. Each expert's product is
that of `linear.linear` on its rows, bit for bit: a kernel that brings `experts` does all in one call, else there is
one call an expert. The shapes do not depend on how tokens are routed, so torch.compile sees no graph break.

Shape legend: S rows of x (pairs of token and expert), E experts, N out_features, K in_features, R bytes a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import choose
from .linear import is_watched, problem_of
from .packing import not_codes
from .rows import BITS, FIELD, rows_of


_library = torch.library.Library("hf_lowbit", "FRAGMENT")
_SCHEME = "int field, int in_features, int group_size"
_library.define(
    "experts(Tensor x, Tensor offsets, Tensor weight, Tensor scale, Tensor? zero_point, Tensor? bias, "
    f"{_SCHEME}, bool int8_activations) -> Tensor"
)
_library.define(
    "experts_backward(Tensor grad, Tensor offsets, Tensor weight, Tensor scale, Tensor? zero_point, "
    f"{_SCHEME}) -> Tensor"
)


def experts_linear(
    x: Tensor,
    offsets: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    bits: str | int,
    in_features: int,
    group_size: int | None = None,
    int8_activations: bool = False,
) -> Tensor:
    """y [S, N] of x [S, K] float, offsets int64 [E + 1] ascending within [0, S], packed `weight` int8 [E, 1, N, R],
    `scale` and `zero_point` [E, N or 1, G], bias [E, N] or None. y has x's dtype; under autocast, autocast's."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        # as in `linear`
        x = x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return experts_linear(
                x, offsets, weight, scale, zero_point, bias, bits, in_features, group_size, int8_activations
            )
    bias = None if bias is None else bias.to(x.dtype)
    if type(x) is Tensor and not torch.is_grad_enabled() and not is_watched():
        return _experts(
            x, offsets, weight, scale, zero_point, bias, bits, in_features, group_size or 0, int8_activations
        )
    return torch.ops.hf_lowbit.experts(
        x, offsets, weight, scale, zero_point, bias, FIELD[bits], in_features, group_size or 0, int8_activations
    )


def segments(offsets: Tensor):
    """(expert, slice of its rows) for each expert that has rows."""
    bounds = offsets.tolist()
    for expert, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if end > begin:
            yield expert, slice(begin, end)


def _experts(x, offsets, weight, scale, zero_point, bias, bits, in_features, group_size, int8_activations):
    if weight.dtype is not torch.int8:
        raise not_codes(weight)
    matrices = weight.squeeze(-3)
    scheme = bits, in_features, group_size, int8_activations
    problem = problem_of(x, matrices[0], scale[0], None if zero_point is None else zero_point[0], *scheme)
    kernel = choose(problem).kernel
    if kernel.experts is not None:
        return kernel.experts(x, offsets, matrices, scale, zero_point, bias, problem)
    y = x.new_zeros(x.shape[0], matrices.shape[1])
    for e, own in segments(offsets):
        parts = x[own], matrices[e], scale[e], None if zero_point is None else zero_point[e]
        problem = problem_of(*parts, *scheme)
        y[own] = choose(problem).kernel.run(*parts, None if bias is None else bias[e], problem)
    return y


def _run(x, offsets, weight, scale, zero_point, bias, field, in_features, group_size, int8_activations):
    return _experts(
        x, offsets, weight, scale, zero_point, bias, BITS[field], in_features, group_size, int8_activations
    )


def _meta(x, offsets, weight, scale, zero_point, bias, field, in_features, group_size, int8_activations):
    torch._check(x.shape[1] == in_features, lambda: f"Expected {in_features} input features. Got {x.shape[1]}.")
    return x.new_empty(x.shape[0], weight.shape[-2])


def _save(ctx, inputs, output):
    _, offsets, weight, scale, zero_point, bias, *ctx.scheme, _ = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(offsets, weight, scale, zero_point)


def _backward(ctx, grad):
    offsets, weight, scale, zero_point = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.hf_lowbit.experts_backward(grad, offsets, weight, scale, zero_point, *ctx.scheme)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[5]:
        count = weight.shape[0]
        # 0 owns what lies before the first expert's rows, count + 1 what lies behind the last one's
        owner = torch.searchsorted(offsets, torch.arange(grad.shape[0], device=grad.device), right=True)
        sums = grad.new_zeros(count + 2, grad.shape[1], dtype=torch.float32)
        grad_bias = sums.index_add(0, owner, grad.to(torch.float32))[1:-1].to(ctx.bias_dtype)
    return grad_x, None, None, None, None, grad_bias, None, None, None, None


def _run_backward(grad, offsets, weight, scale, zero_point, field, in_features, group_size):
    grad_x = grad.new_zeros(grad.shape[0], in_features)
    for e, own in segments(offsets):
        zero = None if zero_point is None else zero_point[e]
        dense = rows_of(
            weight[e].squeeze(-3), scale[e], zero, None, BITS[field], in_features, group_size, grad.dtype
        )  # fmt: skip
        grad_x[own] = grad[own] @ dense
    return grad_x


def _meta_backward(grad, offsets, weight, scale, zero_point, field, in_features, group_size):
    return grad.new_empty(grad.shape[0], in_features)


def _save_backward(ctx, inputs, output):
    _, offsets, weight, scale, zero_point, *ctx.scheme = inputs
    ctx.save_for_backward(offsets, weight, scale, zero_point)


def _backward_twice(ctx, grad):
    # the gradient is linear in what comes back, by the same weights
    offsets, weight, scale, zero_point = ctx.saved_tensors
    y = torch.ops.hf_lowbit.experts(grad, offsets, weight, scale, zero_point, None, *ctx.scheme, False)
    return y, *[None] * 7


for _name, _function, _fake, _grad, _context in (
    ("experts", _run, _meta, _backward, _save),
    ("experts_backward", _run_backward, _meta_backward, _backward_twice, _save_backward),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_lowbit::{_name}", _fake, lib=_library)
    torch.library.register_autograd(f"hf_lowbit::{_name}", _grad, setup_context=_context, lib=_library)
