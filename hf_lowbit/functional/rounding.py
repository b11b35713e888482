"""How weights land on a grid without data: round to nearest, with the clip that loses least.

For a group x with codes v = q - z, the squared error at the best scale is

    min_s |x - s v|^2  =  |x|^2 - <x, v>^2 / <v, v>        at   s = <x, v> / <v, v>

so a candidate step (a fraction of the one that just covers the group: a clip) is rated by <x, v>^2 / <v, v> alone,
without building the dequantized group. The winner's scale is rounded to its stored dtype and the codes are rounded
once more with exactly that scale. Plain absmax (`search=False`) is unusable at 2 and 3 bits; the search is the same
idea as the clipping search of llama.cpp's k-quants and of HQQ, written for all grids at once.

Ternary takes no search: s = mean|w|, q = clamp(round(w / s), -1, 1) (BitNet b1.58, Ma et al. 2024, eq. 1-3).

Groups are rows of X [rows, group]: one row a group, whatever the weight's shape was.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .grid import TERNARY, Grid, expand_groups


# clip fractions of the step that just covers the group, per bits: long tails (rows, whole tensors) want the low end
CLIPS = {
    8: (0.55, 0.7, 0.85, 1.0),
    4: tuple(0.36 + 0.04 * i for i in range(17)),
    3: tuple(0.25 + 0.05 * i for i in range(16)),
    2: tuple(0.15 + 0.05 * i for i in range(18)),
}
# how far the zero point may move from where the group's minimum puts it
ZERO_POINT_SHIFTS = {8: (0,), 4: (0,), 3: (-1, 0, 1), 2: (-2, -1, 0, 1, 2)}
# elements rated at a time: small enough to stay in a core's cache
CHUNK = 1 << 17
# scale of a group of zeros: any finite number would do; small, so that a trained code starts small
ZERO_GROUP_SCALE = 1e-5


class Quantized(NamedTuple):
    """Codes int8 [N, K], scale [N, G] (or [N, 1], [1, 1]) and zero point int8 of the same shape, or None."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None


def scale_dtype(group_size: int | str | None) -> torch.dtype:
    """bfloat16 when there are many scales (groups), float32 when there are few (channel, tensor)."""
    return torch.bfloat16 if isinstance(group_size, int) else torch.float32


def round_to_nearest(
    weight: Tensor, grid: Grid, group_size: int | str | None, symmetric: bool, search: bool = True
) -> Quantized:
    """Quantize `weight` [N, K] (any float dtype) without data.

    `group_size`: weights a scale serves along K; None is one scale a row; "tensor" one for all. `symmetric=False` adds
    zero points. `search=False` covers the whole range of each group (absmax, or min and max). Raises ValueError when
    the weight holds NaN or infinity.
    """
    rows, in_features = weight.shape
    x, group = _as_groups(weight.detach().to(torch.float32), group_size)
    largest = x.abs().amax(dim=1, keepdim=True) if x.numel() else x.new_zeros(x.shape[0], 1)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("the weight holds NaN or infinity")
    dtype = scale_dtype(group_size)
    if grid.bits == TERNARY:
        scale, zero_point = _absmean(x, rows, in_features, group_size), None
    else:
        scale, zero_point = _search(x, largest, grid, symmetric, search)
    scale = torch.where((scale > 0) & (largest > 0), scale, ZERO_GROUP_SCALE).to(dtype)
    # a scale that underflows its dtype would make every code infinite
    scale = torch.where(scale > 0, scale, torch.finfo(dtype).tiny)
    shape = (1, 1) if group_size == "tensor" else (rows, -1)
    scale = scale.reshape(shape)
    zero_point = None if zero_point is None else zero_point.to(torch.int8).reshape(shape)
    return Quantized(to_codes(weight, grid, scale, zero_point, group), scale, zero_point)


def to_codes(weight: Tensor, grid: Grid, scale: Tensor, zero_point: Tensor | None, group_size: int | None) -> Tensor:
    """Nearest codes int8 [N, K] of `weight` for a given scale and zero point."""
    in_features = weight.shape[-1]
    q = weight.detach().to(torch.float32) / expand_groups(scale.to(torch.float32), in_features, group_size)
    q = q.round_()
    if zero_point is not None:
        q += expand_groups(zero_point, in_features, group_size).to(torch.float32)
    return q.clamp_(grid.qmin, grid.qmax).to(torch.int8)


def _as_groups(weight: Tensor, group_size: int | str | None) -> tuple[Tensor, int | None]:
    """[N, K] -> ([rows, group], group size along K or None). A short last group is filled with zeros."""
    if group_size == "tensor":
        return weight.reshape(1, -1), None
    if group_size is None or group_size >= weight.shape[1]:
        return weight, group_size
    padded = F.pad(weight, (0, -weight.shape[1] % group_size))
    return padded.reshape(-1, group_size), group_size


def _absmean(x: Tensor, rows: int, in_features: int, group_size: int | str | None) -> Tensor:
    total = x.abs().sum(dim=1, keepdim=True, dtype=torch.float64)
    if not isinstance(group_size, int) or group_size >= in_features:
        count = max(x.shape[1], 1)
    else:
        count = torch.full((x.shape[0] // rows,), group_size, device=x.device)
        count[-1] -= -in_features % group_size
        count = count.repeat(rows).unsqueeze(1)
    return (total / count).to(torch.float32)


def _search(x: Tensor, largest: Tensor, grid: Grid, symmetric: bool, search: bool) -> tuple[Tensor, Tensor | None]:
    scale = torch.empty_like(largest)
    zero_point = None if symmetric else torch.empty_like(largest)
    step = max(1, CHUNK // max(1, x.shape[1]))
    for start in range(0, x.shape[0], step):
        part = slice(start, start + step)
        # in units of the largest magnitude: no over- or underflow in the sums of squares
        unit = torch.where(largest[part] > 0, largest[part], 1.0)
        best, zero = _search_chunk(x[part] / unit, grid, symmetric, search)
        scale[part] = best * unit
        if zero_point is not None:
            zero_point[part] = zero
    return scale, zero_point


def _search_chunk(x: Tensor, grid: Grid, symmetric: bool, search: bool) -> tuple[Tensor, Tensor]:
    """Best step and zero point of each row of `x` [rows, group], largest magnitude 1 (or all zeros)."""
    if symmetric:
        cover = x.new_full((x.shape[0], 1), 1.0 / grid.qmax)
        zeros = [x.new_zeros(x.shape[0], 1)]
    else:
        low = x.amin(dim=1, keepdim=True).clamp_(max=0.0)
        high = x.amax(dim=1, keepdim=True).clamp_(min=0.0)
        cover = ((high - low) / grid.levels).clamp_(min=1e-12)
        base = (grid.qmin - low / cover).round_().clamp_(grid.qmin, grid.qmax)
        shifts = ZERO_POINT_SHIFTS[grid.bits] if search else (0,)
        zeros = [(base + shift).clamp_(grid.qmin, grid.qmax) for shift in shifts]
    if not search:
        return cover, zeros[0]
    best_gain = torch.full_like(cover, -1.0)
    best_step, best_zero = cover.clone(), zeros[0].clone()
    q, product = torch.empty_like(x), torch.empty_like(x)
    for zero in zeros:
        lowest, highest = grid.qmin - zero, grid.qmax - zero
        for clip in CLIPS[grid.bits]:
            torch.mul(x, 1.0 / (cover * clip), out=q).round_()
            torch.maximum(torch.minimum(q, highest, out=q), lowest, out=q)
            cross = torch.mul(x, q, out=product).sum(dim=1, keepdim=True)
            power = torch.mul(q, q, out=product).sum(dim=1, keepdim=True).clamp_(min=1e-30)
            gain = cross * cross / power
            better = (gain > best_gain) & (cross > 0)
            best_gain = torch.where(better, gain, best_gain)
            best_step = torch.where(better, cross / power, best_step)
            best_zero = torch.where(better, zero, best_zero)
    return best_step, best_zero
