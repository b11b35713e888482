"""GPTQ: codes that compensate each other's rounding errors, for the inputs a layer really sees.

For a weight W [N, K] and inputs X [T, K] the error of the outputs is quadratic, with the same H for every row:

    |X W^T - X W'^T|^2 = tr (W - W') H (W - W')^T,        H = X^T X

Columns are rounded one after the other, those with the largest H_jj first (activation order). With U upper triangular
and H^-1 = U^T U, the error of column j is spread over the columns that are still free (Frantar et al. 2022, eq. 2-3
and algorithm 1):

    e = (w_j - w'_j) / U_jj,        w_i <- w_i - e U_ji   for all i > j

`BLOCK` columns are finished before the rest of W is updated, by one product.

Where we differ: scales and zero points are those of round to nearest, found on the whole group before the first column
(so groups stay contiguous in whatever order columns come), and are fitted once more afterwards to the codes that were
chosen (`refit`). H is damped by a share of its mean diagonal but never by less than an absolute floor, so that inputs
which never occurred are simply rounded; where H still can't be factored, damping grows tenfold, and finally the weight
is rounded without data. `Solution.note` says so.

All matrices here are transposed, [K, N]: a column of W is then a contiguous row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...configs.scheme import Scheme
from ...functional.grid import dequantize, expand_groups, grid_of
from ...functional.rounding import Quantized, round_to_nearest, scale_dtype


BLOCK = 64
# damping as a share of the mean diagonal, its growth when H can't be factored, and how often it may grow
DAMPING, GROWTH, RAISES = 0.01, 10.0, 4
# never less than this: all-zero inputs have a mean diagonal of zero
FLOOR = 1e-6


@dataclass
class Solution:
    """Codes, scale and zero point of one weight, and `error`: tr(D H D^T) / tr(W H W^T) with D = W - W'.

    `note` is None, or says what was not done as asked.
    """

    quantized: Quantized
    error: float
    note: str | None = None


def solve(
    weights: list[Tensor], hessian: Tensor, schemes: list[Scheme], damping: float = DAMPING, refine: bool = True
) -> list[Solution]:
    """Quantize weights that read the same inputs: float32 [N_i, K] each, with `hessian` float32 [K, K] = X^T X.

    Weights whose groups agree are solved as one. Changes neither weights nor hessian. Raises ValueError when a weight
    holds NaN or infinity.
    """
    starts = [
        round_to_nearest(w, grid_of(scheme.bits), scheme.group_size, scheme.symmetric)
        for w, scheme in zip(weights, schemes, strict=True)
    ]
    factor = factorize(hessian, damping)
    if factor is None:
        note = "H is not positive definite at any damping: rounded without data"
        return [
            Solution(q, relative_error(w, q, scheme, hessian), note)
            for w, q, scheme in zip(weights, starts, schemes, strict=True)
        ]
    solutions: list[Solution | None] = [None] * len(weights)
    for block in dict.fromkeys(scheme.block for scheme in schemes):
        members = [i for i, scheme in enumerate(schemes) if scheme.block == block]
        codes = _round_columns([weights[i] for i in members], [starts[i] for i in members],
                               [schemes[i] for i in members], factor)  # fmt: skip
        for i, code in zip(members, codes, strict=True):
            found = Quantized(code, starts[i].scale, starts[i].zero_point)
            if refine:
                found = refit(weights[i], found, schemes[i], hessian)
            error = relative_error(weights[i], found, schemes[i], hessian)
            rounded = relative_error(weights[i], starts[i], schemes[i], hessian)
            note = factor.note
            if not error <= rounded:
                found, error, note = starts[i], rounded, "compensation did not help: rounded without data"
            solutions[i] = Solution(found, error, note)
    return solutions


@dataclass
class Factor:
    """The order of columns and U [K, K] in that order, with H^-1 = U^T U."""

    order: Tensor
    upper: Tensor
    note: str | None


def factorize(hessian: Tensor, damping: float = DAMPING) -> Factor | None:
    """U of the damped Hessian, or None when it has NaN or can't be factored at any damping."""
    diagonal = hessian.diagonal()
    if not bool(torch.isfinite(hessian).all()):
        return None
    order = torch.argsort(diagonal, descending=True, stable=True)
    # H = R R^T with R upper triangular is Cholesky's factor of H read backwards; then U = R^-1
    backwards = order.flip(0)
    reversed_ = hessian[backwards][:, backwards]
    amount = max(damping * float(diagonal.mean()), FLOOR)
    for attempt in range(RAISES + 1):
        damped = reversed_.clone()
        damped.diagonal().add_(amount)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            eye = torch.eye(len(order), dtype=lower.dtype, device=lower.device)
            upper = torch.linalg.solve_triangular(lower, eye, upper=False).flip(0, 1)
            # inputs near the end of float32 make U underflow, and its diagonal is divided by
            if bool(torch.isfinite(upper).all() & (upper.diagonal() > 0).all()):
                note = f"damping raised to {amount:.2g} to factor H" if attempt else None
                return Factor(order, upper, note)
        amount *= GROWTH
    return None


def _round_columns(
    weights: list[Tensor], starts: list[Quantized], schemes: list[Scheme], factor: Factor
) -> list[Tensor]:
    """Codes int8 [N_i, K] of weights with the same groups."""
    in_features, block = weights[0].shape[1], schemes[0].block
    work = torch.cat(weights).t()[factor.order].contiguous()
    scale, low, high = (torch.cat(parts).t().contiguous() for parts in zip(
        *(_bounds(w.shape[0], q, s) for w, q, s in zip(weights, starts, schemes, strict=True)), strict=True
    ))  # fmt: skip
    inverse = scale.reciprocal()
    group = (factor.order // block if block else torch.zeros_like(factor.order)).tolist()
    upper, diagonal = factor.upper, factor.upper.diagonal().tolist()
    values, errors = torch.empty_like(work), work.new_empty(BLOCK, work.shape[1])
    for start in range(0, in_features, BLOCK):
        stop = min(start + BLOCK, in_features)
        for j in range(start, stop):
            g, w, v, e = group[j], work[j], values[j], errors[j - start]
            torch.mul(w, inverse[g], out=v).round_()
            torch.clamp(v, low[g], high[g], out=v)
            torch.addcmul(w, v, scale[g], value=-1, out=e).mul_(1.0 / diagonal[j])
            if j + 1 < stop:
                work[j + 1 : stop].addr_(upper[j, j + 1 : stop], e, alpha=-1)
        if stop < in_features:
            work[stop:].addmm_(upper[start:stop, stop:].t(), errors[: stop - start], alpha=-1)
    inverse_order = torch.argsort(factor.order)
    codes = values[inverse_order].t().split([w.shape[0] for w in weights])
    return [
        (v if q.zero_point is None else v + expand_groups(q.zero_point.to(v.dtype), in_features, block))
        .contiguous().to(torch.int8) for v, q in zip(codes, starts, strict=True)
    ]  # fmt: skip


def _bounds(rows: int, start: Quantized, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, and the least and largest q - z, each [N, G]."""
    grid = grid_of(scheme.bits)
    scale = start.scale.to(torch.float32).expand(rows, -1)
    zero = 0.0 if start.zero_point is None else start.zero_point.to(torch.float32).expand(rows, -1)
    return scale, torch.zeros_like(scale) + grid.qmin - zero, torch.zeros_like(scale) + grid.qmax - zero


def refit(weight: Tensor, found: Quantized, scheme: Scheme, hessian: Tensor) -> Quantized:
    """The scales that are best for the chosen codes: with V_g the codes q - z of group g, zero elsewhere,

        min_s (w - sum_g s_g V_g) H (w - sum_g s_g V_g)^T    at    sum_h (V_g H V_h^T) s_h = V_g H w^T

    solved for every row. Rows whose scale would not be positive, or not better once rounded, keep theirs.
    """
    if scheme.group_size == "tensor":
        return found
    in_features = weight.shape[1]
    values = dequantize(found.codes, torch.ones_like(found.scale, dtype=torch.float32), found.zero_point, scheme.block)
    groups = found.scale.shape[1]
    right = _sum_groups(values * (weight @ hessian), scheme.block, groups)
    left = weight.new_empty(weight.shape[0], groups, groups)
    for g in range(groups):
        part = slice(0, in_features) if groups == 1 else slice(g * scheme.block, (g + 1) * scheme.block)
        left[:, g] = _sum_groups(values[:, part] @ hessian[part] * values, scheme.block, groups)
    left = (left + left.transpose(1, 2)) / 2
    # a group of zeros has no scale of its own: its equation becomes s = s_old
    old = found.scale.to(torch.float32)
    ridge = 1e-4 * left.diagonal(dim1=1, dim2=2).mean(dim=1, keepdim=True) + 1e-12
    left.diagonal(dim1=1, dim2=2).add_(ridge)
    scale = torch.linalg.solve_ex(left, (right + ridge * old).unsqueeze(-1))[0].squeeze(-1)
    dtype = scale_dtype(scheme.group_size)
    usable = torch.isfinite(scale) & (scale > 0.25 * old) & (scale < 4 * old)
    scale = torch.where(usable.all(dim=1, keepdim=True), scale, old).to(dtype)
    better = _row_errors(weight, found._replace(scale=scale), scheme, hessian) < _row_errors(
        weight, found, scheme, hessian
    )
    return found._replace(scale=torch.where(better[:, None], scale, found.scale))


def _sum_groups(x: Tensor, block: int | None, groups: int) -> Tensor:
    """Sums over the columns of each group: [N, K] -> [N, G]."""
    if groups == 1:
        return x.sum(dim=1, keepdim=True)
    padded = torch.nn.functional.pad(x, (0, groups * block - x.shape[1]))
    return padded.view(x.shape[0], groups, block).sum(dim=2)


def _row_errors(weight: Tensor, found: Quantized, scheme: Scheme, hessian: Tensor) -> Tensor:
    difference = weight - dequantize(*found, scheme.block)
    return (difference @ hessian * difference).sum(dim=1)


def relative_error(weight: Tensor, found: Quantized, scheme: Scheme, hessian: Tensor) -> float:
    """tr(D H D^T) / tr(W H W^T); where the outputs are zero on the data, the relative error of the weight."""
    lost, whole = float(_row_errors(weight, found, scheme, hessian).sum()), float((weight @ hessian * weight).sum())
    if whole > 0:
        return max(lost, 0.0) / whole
    difference = weight - dequantize(*found, scheme.block)
    return float(difference.square().sum() / weight.square().sum().clamp_min(1e-30))
