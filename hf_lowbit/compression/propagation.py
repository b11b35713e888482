"""Error propagation: a weight is moved, before it is rounded, toward what the dense model gives on its own inputs.

X are a layer's inputs in the dense model, Xq those in the model as it is quantized so far (Quantization Error
Propagation, Arai & Ichikawa 2025):

    min_W* |X W^T - Xq W*^T|^2   at   W + D,   D = W C (H + damping)^-1,   H = Xq^T Xq,   C = (X - Xq)^T Xq

of which a share a is taken, W* = W + a D. A fixed share fits the calibration tokens, and may fit nothing else. So the
share can be chosen by tokens that D has not seen: with D_A from one half of the batches, the best share on the other
is

    a_A = tr(W C_B D_A^T) / tr(D_A H_B D_A^T),

of both ways round the sums of numerators and denominators are taken, cut to [0, 1]. Where the correction is noise the
share is near zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .solvers.gptq import DAMPING, FLOOR
from .statistics import Inputs


@dataclass(frozen=True)
class Propagation:
    """How much of the correction is taken: a share in (0, 1], or None for the best on the other half of the batches.

    `damping` is added to the diagonal of H, as a share of its mean. Raises ValueError for values outside.
    """

    share: float | None = None
    damping: float = DAMPING

    def __post_init__(self):
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"`share`={self.share!r} must lie above 0 and not above 1, or be None.")
        if not 0 < self.damping < float("inf"):
            raise ValueError(f"`damping`={self.damping!r} must be a positive number.")


def correct(weight: Tensor, found: Inputs, propagation: Propagation) -> tuple[Tensor, float]:
    """W* of a weight float32 [N, K] and the share that was taken; the weight itself and 0 where there is no drift, or
    H can't be factored."""
    if found.drift is None:
        return weight, 0.0
    moved = _moved(weight, found.hessian, found.drift, propagation.damping)
    share = propagation.share
    if share is None:
        share = _share(weight, found, propagation.damping)
    if moved is None or share == 0.0:
        return weight, 0.0
    return weight + share * moved, share


def _share(weight: Tensor, found: Inputs, damping: float) -> float:
    other = found.hessian - found.half_hessian, found.drift - found.half_drift
    halves = [(found.half_hessian, found.half_drift), other]
    wanted = length = 0.0
    for (hessian, drift), (unseen_hessian, unseen_drift) in (halves, halves[::-1]):
        moved = _moved(weight, hessian, drift, damping)
        if moved is None:
            return 0.0
        wanted += float(((weight @ unseen_drift) * moved).sum(dtype=torch.float64))
        length += float(((moved @ unseen_hessian) * moved).sum(dtype=torch.float64))
    return min(max(wanted / length, 0.0), 1.0) if length > 0 else 0.0


def _moved(weight: Tensor, hessian: Tensor, drift: Tensor, damping: float) -> Tensor | None:
    """D, or None where H can't be factored."""
    damped = hessian.clone()
    damped.diagonal().add_(max(damping * float(damped.diagonal().mean()), FLOOR))
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        return None
    moved = torch.cholesky_solve((weight @ drift).t(), lower).t()
    return moved if bool(torch.isfinite(moved).all()) else None
