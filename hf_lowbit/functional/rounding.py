"""How weights land on a grid without data: round to nearest, with the clip that loses least.

For a group x with codes v = q - z, the squared error weighted by magnitude, at the best scale, is

    min_s sum_i |x_i| (x_i - s v_i)^2  =  <x, |x| x> - <x, |x| v>^2 / <v, |x| v>      at   s = <x, |x| v> / <v, |x| v>

so a candidate step (a clip: a fraction of the step that just covers the group) is rated by <x, |x| v>^2 / <v, |x| v>
alone, without building the dequantized group. The winner's scale is rounded to its stored dtype and the codes are
rounded once more with exactly that scale. Plain absmax (`search=False`) is unusable at 2 and 3 bits.

Why |x_i|: the plain squared error clips the few large weights of a group, and a language model pays for those first.
At 4 bits it is worse than no clip at all in perplexity; weighting by x_i^2 is worse per channel. The choice was made
on Emma, a calibration text; docs/quality.md has the search beside plain absmax on another. Weighted searches are also
what llama.cpp does for its k-quants without data.

Ternary takes no search: s = mean|w|, q = clamp(round(w / s), -1, 1) (BitNet b1.58, Ma et al. 2024, eq. 1-3).

Groups are rows of X [rows, group]: one row a group, whatever the weight's shape was.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .grid import TERNARY, Grid, expand_groups, group_count


# the search starts at the finest step worth trying, in units of the group's root mean square, and ends at the step
# that covers the group; COARSE steps lie between, at equal ratios, and REFINE rounds then narrow the best one
FINEST = {2: 0.45, 3: 0.25, 4: 0.14, 8: 0.012}
COARSE = {2: 8, 3: 7, 4: 7, 8: 4}
REFINE = 2
# how far the zero point may move from where the group's minimum puts it
ZERO_POINT_SHIFTS = {2: (-2, -1, 1, 2), 3: (-1, 1), 4: (), 8: ()}
# a float32 of this size has no bits for a fraction: adding and subtracting it rounds to the nearest integer, ties to
# even. torch's own `round_` wakes every thread from 2048 elements on, and waits for them
NO_FRACTION = 1.5 * 2.0**23
# elements rated at a time: torch runs operations of this size on one thread, and they stay in a core's cache
CHUNK = 1 << 15
# scale of a group of zeros: any finite number would do; small, so that a trained code starts small
ZERO_GROUP_SCALE = 1e-5


class Quantized(NamedTuple):
    """Codes int8 [N, K], scale [N, G] (or [N, 1], [1, 1]) and zero point int8 of the same shape, or None."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None


def scale_dtype(group_size: int | str | None, scales: str | None = None) -> torch.dtype:
    """bfloat16 when there are many scales (groups; `scales` may ask for float32), float32 when there are few (channel,
    tensor)."""
    return torch.bfloat16 if isinstance(group_size, int) and scales is None else torch.float32


def round_to_nearest(
    weight: Tensor,
    grid: Grid,
    group_size: int | str | None,
    symmetric: bool,
    search: bool = True,
    scales: str | None = None,
) -> Quantized:
    """Quantize `weight` [N, K] (any float dtype) without data.

    `group_size`: weights a scale serves along K; None is one scale a row; "tensor" one for all. `symmetric=False` adds
    zero points. `search=False` covers the whole range of each group (absmax, or min and max). `scales="float32"`
    keeps the scales of groups in float32. Raises ValueError when
    the weight holds NaN or infinity.
    """
    rows, in_features = weight.shape
    x, group = _as_groups(weight.detach().to(torch.float32), group_size)
    largest = x.abs().amax(dim=1, keepdim=True) if x.numel() else x.new_zeros(x.shape[0], 1)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("the weight holds NaN or infinity")
    dtype = scale_dtype(group_size, scales)
    if grid.bits == TERNARY:
        scale, zero_point = _absmean(x, rows, in_features, group_size), None
    else:
        scale, zero_point = _search(x, largest, grid, symmetric, search)
    # no product of a scale and a code may overflow float32, in which numbers are formed
    reach = max(-grid.qmin, grid.qmax) if symmetric else grid.levels
    scale = scale.clamp(max=torch.finfo(torch.bfloat16).max / reach)
    scale = torch.where((scale > 0) & (largest > 0), scale, ZERO_GROUP_SCALE).to(dtype)
    # a scale that underflows its dtype would make every code infinite
    scale = torch.where(scale > 0, scale, torch.finfo(dtype).tiny)
    groups = max(1, group_count(in_features, group_size if isinstance(group_size, int) else None))
    shape = (1, 1) if group_size == "tensor" else (rows, groups)
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
        count = torch.full((group_count(in_features, group_size),), group_size, device=x.device)
        count[-1] -= -in_features % group_size
        count = count.repeat(rows).unsqueeze(1)
    return (total / count).to(torch.float32)


def _search(x: Tensor, largest: Tensor, grid: Grid, symmetric: bool, search: bool) -> tuple[Tensor, Tensor | None]:
    """Scale [rows, 1] and, unless symmetric, zero point [rows, 1] of the groups `x` [rows, group]."""
    rows = max(1, CHUNK // max(1, x.shape[1]))

    def search_part(part: slice) -> tuple[Tensor, Tensor]:
        # in units of the largest magnitude: no over- or underflow in the sums of squares
        unit = torch.where(largest[part] > 0, largest[part], 1.0)
        step, zero = _search_chunk(x[part] / unit, grid, symmetric, search)
        return step * unit, zero

    parts = [slice(start, start + rows) for start in range(0, x.shape[0], rows)]
    threads = min(torch.get_num_threads(), len(parts))
    if threads > 1 and x.device.type == "cpu":
        # one thread a chunk, and no barrier inside: torch's own threads would wait for each other in every operation
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(search_part, parts))
    else:
        found = [search_part(part) for part in parts]
    # put together here: the workers are outside of the caller's inference mode, and may not write to its tensors
    scale, zero_point = torch.empty_like(largest), torch.empty_like(largest)
    for part, (step, zero) in zip(parts, found, strict=True):
        scale[part], zero_point[part] = step, zero
    return scale, None if symmetric else zero_point


def _search_chunk(x: Tensor, grid: Grid, symmetric: bool, search: bool) -> tuple[Tensor, Tensor]:
    """Best step and zero point of each row of `x` [rows, group], largest magnitude 1 (or all zeros)."""
    if symmetric:
        cover, zero = x.new_full((x.shape[0], 1), 1.0 / grid.qmax), x.new_zeros(x.shape[0], 1)
    else:
        low = x.amin(dim=1, keepdim=True).clamp_(max=0.0)
        high = x.amax(dim=1, keepdim=True).clamp_(min=0.0)
        cover = ((high - low) / grid.levels).clamp_(min=1e-12)
        zero = (grid.qmin - low / cover).round_().clamp_(grid.qmin, grid.qmax)
    if not search:
        return cover, zero
    best = _Best(x, grid, cover, zero, symmetric)
    spread = x.square().mean(dim=1, keepdim=True).sqrt_()
    finest = torch.minimum(FINEST[grid.bits] * spread, 0.7 * cover).clamp_(min=1e-12)
    ratio = (cover / finest).log_().div_(COARSE[grid.bits] - 1)
    for index in range(COARSE[grid.bits]):
        best.rate(finest * torch.exp(index * ratio), zero)
    tried = best.tried.clone()
    for shift in () if symmetric else ZERO_POINT_SHIFTS[grid.bits]:
        shifted = (zero + shift).clamp_(grid.qmin, grid.qmax)
        for factor in (0.85, 1.0, 1.18):
            best.rate(tried * factor, shifted)
    for round_ in range(1, REFINE + 1):
        tried = best.tried.clone()
        for direction in (-1, 1):
            best.rate(tried * torch.exp(direction * ratio / 3**round_), best.zero)
    return best.step, best.zero


class _Best:
    """The best candidate so far of each row: the step it was rounded with, the scale that then fits best, the zero."""

    def __init__(self, x: Tensor, grid: Grid, step: Tensor, zero: Tensor, symmetric: bool):
        self.x, self.grid, self.symmetric = x, grid, symmetric
        self.weights = x.abs()
        self.weighted = x * self.weights
        self.gain = torch.full_like(step, -1.0)
        self.tried, self.step, self.zero = step.clone(), step.clone(), zero.clone()
        self._v, self._product = torch.empty_like(x), torch.empty_like(x)

    def rate(self, step: Tensor, zero: Tensor) -> None:
        """Round with `step` around `zero` and keep, row by row, what is better than before."""
        v = torch.mul(self.x, step.reciprocal(), out=self._v)
        if self.symmetric:
            # bounds that are numbers are much faster than tensors
            torch.clamp(v, self.grid.qmin, self.grid.qmax, out=v)
        else:
            torch.clamp(v, self.grid.qmin - zero, self.grid.qmax - zero, out=v)
        v.add_(NO_FRACTION).sub_(NO_FRACTION)
        cross = torch.mul(self.weighted, v, out=self._product).sum(dim=1, keepdim=True)
        power = torch.mul(v, v, out=self._product).mul_(self.weights).sum(dim=1, keepdim=True).clamp_(min=1e-30)
        gain = cross * cross / power
        better = (gain > self.gain) & (cross > 0)
        self.gain = torch.where(better, gain, self.gain)
        self.tried = torch.where(better, step, self.tried)
        self.step = torch.where(better, cross / power, self.step)
        self.zero = torch.where(better, zero, self.zero)
