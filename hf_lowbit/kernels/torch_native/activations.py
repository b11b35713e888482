"""int8 activations, in parts that stay in cache: rounding before the product, and the scale of each token after it.

The same numbers as `functional.linear.quantize_activations`, for less time: whole tensors in float32 would go through
memory at each step, and for one token the steps on its scale are cheaper as numbers than as tensors. Codes of a row
with NaN or infinity are undefined here; its t is NaN and decides the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_float

import torch
from torch import Tensor

from .blocks import scratch


# float32 numbers that stay in a core's cache between two steps
PART = 1 << 17
# below this a step costs more for its call than for its numbers
SMALL = 1 << 13


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor | float]:
    """Codes int8 of x [M, K], and t: float32 [M, 1], or a number for one token."""
    if _is_small(x):
        values = x.to(torch.float32, copy=True)
        scale = _round(values, values.abs())
        return values.to(torch.int8), scale
    codes = torch.empty(x.shape, dtype=torch.int8)
    scales = []
    for part, values, scale in _rounded_parts(x):
        codes[part] = values
        scales.append(scale)
    return codes, torch.cat(scales)


def round_tokens(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers t a [M, K] that stand for x, in `dtype`."""
    if _is_small(x):
        values = x.to(torch.float32, copy=True)
        return values.mul_(_round(values, values.abs())).to(dtype)
    rounded = torch.empty(x.shape, dtype=dtype)
    for part, values, scale in _rounded_parts(x):
        rounded[part] = values.mul_(scale)
    return rounded


def scale_tokens(y: Tensor, token_scale: Tensor | float, bias: Tensor | None, out: Tensor) -> Tensor:
    """`out` = y t + bias [M, N], in float32 and rounded once. Changes `y`, float32."""
    step = y.shape[0] if y.numel() <= SMALL else max(1, PART // y.shape[1])
    if y.shape[0] <= step:
        exact = y.mul_(token_scale)
        return out.copy_(exact if bias is None else exact.add_(bias))
    for exact, t, out_part in zip(y.split(step), token_scale.split(step), out.split(step), strict=True):
        exact.mul_(t)
        out_part.copy_(exact if bias is None else exact.add_(bias))
    return out


def _is_small(x: Tensor) -> bool:
    return x.device.type != "cpu" or x.numel() <= SMALL


def _rounded_parts(x: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows, their codes as float32, valid until the next, and their t."""
    step = max(1, PART // x.shape[1])
    for start in range(0, x.shape[0], step):
        part = slice(start, min(start + step, x.shape[0]))
        values = scratch("values", x[part].shape, torch.float32, x.device).copy_(x[part])
        sizes = torch.abs(values, out=scratch("sizes", values.shape, torch.float32, x.device))
        inverse, scale = _scales(sizes)
        yield part, values.mul_(inverse).round_(), scale


def _round(values: Tensor, sizes: Tensor) -> Tensor | float:
    """Turns `values` into their codes; returns t."""
    one = values.shape[0] == 1 and values.shape[1] and values.device.type == "cpu"
    inverse, scale = _number_scale(sizes) if one else _scales(sizes)
    values.mul_(inverse).round_()
    return scale


def _scales(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """1 / t and t, [M, 1] each, for |x|."""
    largest = sizes.amax(dim=1, keepdim=True) if sizes.shape[1] else sizes.new_zeros(sizes.shape[0], 1)
    inverse = largest.reciprocal().mul_(127.0).nan_to_num_(nan=0.0, posinf=0.0)
    return inverse, largest.div(127.0).add_(largest - largest)


def _number_scale(sizes: Tensor) -> tuple[float, float]:
    """`_scales` of one row. A quotient or product of two float32 in double, rounded to float32, is that of float32."""
    largest = sizes.max().item()
    if not math.isfinite(largest):
        return 0.0, math.nan
    inverse = c_float(c_float(1.0 / largest).value * 127.0).value if largest else 0.0
    return inverse if math.isfinite(inverse) else 0.0, c_float(largest / 127.0).value
