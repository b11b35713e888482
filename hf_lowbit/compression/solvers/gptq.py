"""GPTQ: codes that compensate each other's rounding errors, for the inputs a layer really sees.

For a weight W [N, K] and inputs X [T, K] the error of the outputs is quadratic, with the same H for every row:

    |X W^T - X W'^T|^2 = tr D H D^T,        D = W - W',   H = X^T X

Columns are rounded one after the other, those with the largest H_jj first (activation order), and each makes good what
the ones before it lost. With H = R R^T, R upper triangular, and M = R / diag(R) (a column by its pivot),

    tr D H D^T = |D R|^2 = sum_j R_jj^2 |d_j + sum_{i<j} d_i M_ij|^2

so column j is rounded to the code nearest to w_j + sum_{i<j} d_i M_ij. These are the codes of GPTQ (Frantar et al.
2022, eq. 2-3 and algorithm 1) in the form of LDLQ (Chee et al. 2023, QuIP, section 3.1, which proves them equal): no
inverse of H is formed. `BLOCK` columns are finished before the next ones get their share, by one product.

Where we differ: scales and zero points are those of round to nearest, found on the whole group before the first column
(so groups stay contiguous in whatever order columns come), and are fitted afterwards to the codes that were chosen
(`fit`). At 2 and 3 bits both are done again with the fitted scales (`ROUNDS`), and each row keeps its best. H is
damped by a share of its mean diagonal but never by less than an absolute floor, so that inputs which never occurred
are simply rounded; where H still can't be factored, damping grows tenfold, and finally the weight is rounded without
data. `Solution.note` says so.

In the loop over columns matrices are transposed, [K, N]: a column of W is then a contiguous row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...configs.scheme import Scheme
from ...functional.grid import dequantize, expand_groups, grid_of
from ...functional.rounding import Quantized, round_to_nearest, scale_dtype


BLOCK = 32
# how often codes and scales are chosen in turn; more at 4 bits costs time and changes little
ROUNDS = {2: 3, 3: 2}
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
        round_to_nearest(w, grid_of(scheme.bits), scheme.group_size, scheme.symmetric, scales=scheme.scales)
        for w, scheme in zip(weights, schemes, strict=True)
    ]
    factor = factorize(hessian, damping)
    if factor is None:
        note = "H is not positive definite at any damping: rounded without data"
        return [
            Solution(q, _share(w, fit(w, q, scheme, hessian, False), scheme.block), note)
            for w, q, scheme in zip(weights, starts, schemes, strict=True)
        ]
    solutions: list[Solution | None] = [None] * len(weights)
    for block in dict.fromkeys(scheme.block for scheme in schemes):
        members = [i for i, scheme in enumerate(schemes) if scheme.block == block]
        for i, found in zip(members, _solve_alike([weights[i] for i in members], [starts[i] for i in members],
                                                  [schemes[i] for i in members], hessian, factor, refine),
                            strict=True):  # fmt: skip
            note, start = factor.note, _errors(weights[i] - dequantize(*starts[i], block), hessian)
            if not float(found.errors.sum()) <= float(start.sum()):
                note = "compensation did not help: rounded without data"
                found = _Candidate(starts[i], start, found.whole)
            solutions[i] = Solution(found.quantized, _share(weights[i], found, block), note)
    return solutions


@dataclass
class _Candidate:
    """Codes of one weight with the scales that go with them, and of each row d H d^T and w H w^T, [N]."""

    quantized: Quantized
    errors: Tensor
    whole: Tensor


def _solve_alike(weights, starts, schemes, hessian: Tensor, factor: Factor, refine: bool) -> list[_Candidate]:
    """The best of every row of weights whose groups agree."""
    best: list[_Candidate | None] = [None] * len(weights)
    # without fitted scales, and where one serves all rows, a second turn would choose the same codes
    rounds = [ROUNDS.get(s.bits, 1) if refine and s.group_size != "tensor" else 1 for s in schemes]
    for turn in range(max(rounds)):
        again = [i for i, count in enumerate(rounds) if turn < count]
        bases = [starts[i] if best[i] is None else best[i].quantized for i in again]
        codes = _round_columns([weights[i] for i in again], bases, [schemes[i] for i in again], factor)
        for i, base, code in zip(again, bases, codes, strict=True):
            found = fit(weights[i], base._replace(codes=code), schemes[i], hessian, refine)
            best[i] = found if best[i] is None else _better_rows(best[i], found)
    return best


def _better_rows(old: _Candidate, new: _Candidate) -> _Candidate:
    better = new.errors < old.errors
    rows = better[:, None]
    codes = torch.where(rows, new.quantized.codes, old.quantized.codes)
    scale = torch.where(rows, new.quantized.scale, old.quantized.scale)
    errors = torch.where(better, new.errors, old.errors)
    return _Candidate(old.quantized._replace(codes=codes, scale=scale), errors, old.whole)


@dataclass
class Factor:
    """The order of columns, and in that order M [K, K], unit upper triangular: H = M diag(pivots^2) M^T."""

    order: Tensor
    feedback: Tensor
    pivots: Tensor
    note: str | None


def factorize(hessian: Tensor, damping: float = DAMPING) -> Factor | None:
    """M of the damped Hessian, or None when it has NaN or can't be factored at any damping."""
    diagonal = hessian.diagonal()
    if not bool(torch.isfinite(hessian).all()):
        return None
    order = torch.argsort(diagonal, descending=True, stable=True)
    # H = R R^T with R upper triangular is Cholesky's factor of H read backwards
    backwards = order.flip(0)
    reversed_ = hessian[backwards][:, backwards]
    amount = max(damping * float(diagonal.mean()), FLOOR)
    for attempt in range(RAISES + 1):
        damped = reversed_.clone()
        damped.diagonal().add_(amount)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            pivots = lower.diagonal()
            feedback = (lower / pivots).flip(0, 1)
            if bool(torch.isfinite(feedback).all()):
                note = f"damping raised to {amount:.2g} to factor H" if attempt else None
                return Factor(order, feedback, pivots.flip(0), note)
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
    feedback = factor.feedback
    plain, values, lost = work.clone(), torch.empty_like(work), torch.empty_like(work)
    for start in range(0, in_features, BLOCK):
        stop = min(start + BLOCK, in_features)
        if start:
            work[start:stop].addmm_(feedback[:start, start:stop].t(), lost[:start])
        for j in range(start, stop):
            g, v, d = group[j], values[j], lost[j]
            torch.mul(work[j], inverse[g], out=v).round_()
            torch.clamp(v, low[g], high[g], out=v)
            torch.addcmul(plain[j], v, scale[g], value=-1, out=d)
            if j + 1 < stop:
                work[j + 1 : stop].addr_(feedback[j, j + 1 : stop], d)
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


def fit(weight: Tensor, found: Quantized, scheme: Scheme, hessian: Tensor, refine: bool) -> _Candidate:
    """The codes of `found` with the scales that are best for them: V_g are the codes q - z of group g, zero elsewhere,

        min_t (d - sum_g t_g V_g) H (d - sum_g t_g V_g)^T    at    sum_h (V_g H V_h^T) t_h = V_g H d^T

    solved for the change t of every row's scales. Rows whose scale would not be positive, or not better once rounded,
    keep theirs; so do all without `refine`, and scales that rows share.
    """
    nearest = dequantize(*found, scheme.block)
    difference = weight - nearest
    pushed = difference @ hessian
    errors = (pushed * difference).sum(dim=1)
    if not refine or scheme.group_size == "tensor":
        return _Candidate(found, errors, _errors(weight, hessian))
    values = dequantize(found.codes, torch.ones_like(found.scale, dtype=torch.float32), found.zero_point, scheme.block)
    groups, old = found.scale.shape[1], found.scale.to(torch.float32)
    gradient = _sum_groups(values * pushed, scheme.block, groups)
    left = _group_products(values, hessian, scheme.block, groups)
    # w H w^T from d H d^T, without a product of its own
    whole = (pushed * (weight + nearest)).sum(dim=1) + torch.einsum("ng,ngh,nh->n", old, left, old)
    # a group of zeros has no scale of its own: its equation becomes t = 0
    damped = left.clone()
    damped.diagonal(dim1=1, dim2=2).add_(1e-4 * left.diagonal(dim1=1, dim2=2).mean(dim=1, keepdim=True) + 1e-12)
    scale = old + torch.linalg.solve_ex(damped, gradient.unsqueeze(-1))[0].squeeze(-1)
    usable = torch.isfinite(scale) & (scale > 0.25 * old) & (scale < 4 * old)
    scale = torch.where(usable.all(dim=1, keepdim=True), scale, old).to(scale_dtype(scheme.group_size, scheme.scales))
    change = scale.to(torch.float32) - old
    # what the change really made of it is quadratic too, so no further product is needed
    gain = (change * (2 * gradient - (left @ change.unsqueeze(-1)).squeeze(-1))).sum(dim=1)
    better = gain > 0
    scale = torch.where(better[:, None], scale, found.scale)
    return _Candidate(found._replace(scale=scale), torch.where(better, errors - gain, errors), whole)


def _group_products(values: Tensor, hessian: Tensor, block: int | None, groups: int) -> Tensor:
    """V_g H V_h^T of every row: [N, G, G], symmetric."""
    if groups == 1:
        return (values @ hessian * values).sum(dim=1).view(-1, 1, 1)
    found = values.new_empty(values.shape[0], groups, groups)
    for g in range(groups):
        rest = slice(g * block, values.shape[1])
        product = (values[:, g * block : (g + 1) * block] @ hessian[g * block : (g + 1) * block, rest]).mul_(
            values[:, rest]
        )
        found[:, g, g:] = found[:, g:, g] = _sum_groups(product, block, groups - g)
    return found


def _sum_groups(x: Tensor, block: int | None, groups: int) -> Tensor:
    """Sums over the columns of each group: [N, K] -> [N, G]."""
    if groups == 1:
        return x.sum(dim=1, keepdim=True)
    padded = torch.nn.functional.pad(x, (0, groups * block - x.shape[1]))
    return padded.view(x.shape[0], groups, block).sum(dim=2)


def _errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """d H d^T of every row d of [N, K]."""
    return (difference @ hessian * difference).sum(dim=1)


def _share(weight: Tensor, found: _Candidate, block: int | None) -> float:
    """tr(D H D^T) / tr(W H W^T); where the outputs are zero on the data, the relative error of the weight."""
    lost, whole = float(found.errors.sum()), float(found.whole.sum())
    if whole > 0:
        return max(lost, 0.0) / whole
    difference = weight - dequantize(*found.quantized, block)
    return float(difference.square().sum() / weight.square().sum().clamp_min(1e-30))
