"""Layer-wise steps: how far a layer moves follows from the size of its weight, not of its gradient.

Each function takes float32 tensors of equal shape, a whole layer at a time since norms are over all of it, and returns
(step of w' = w - step, new moments...), changing nothing it is given.

    lars    lam = eta |w| / (|g| + wd |w| + eps)
            v'  = mu v + lr lam (g + wd w)
            step = v'                      You et al. 2017, in the form of the MLPerf reference (lars_optimizer.py)
    lamb    m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) g^2
            r  = m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps) + wd w
            step = lr |w| / |r| r          You et al. 2020, algorithm 2, phi the identity

A ratio is 1 where |w| or the norm below it is 0. LARS has the learning rate inside its momentum: a change of the rate
takes effect over 1 / (1 - mu) steps. The form of SGD in torch, with the rate outside, is the same at a constant rate
and another method under warmup and decay; `lr_in_momentum=False` gives it.

`weight=None` is a layer that is not adapted, such as a bias or the weight of a norm: ratio 1, no decay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .directions import adamw


def trust_ratio(weight_norm: Tensor, other: Tensor, eta: float = 1.0) -> Tensor:
    """eta * weight_norm / other, and 1 where either is 0. Norms of any one shape; the result has it too."""
    known = (weight_norm > 0) & (other > 0)
    return torch.where(known, eta * weight_norm / torch.where(known, other, 1.0), 1.0)


def lars_ratio(weight_norm: Tensor, grad_norm: Tensor, eta: float, eps: float, decay: float) -> Tensor:
    """lam of LARS from the norms of one layer, or of many at once."""
    below = torch.where(grad_norm > 0, grad_norm + decay * weight_norm + eps, 0.0)
    return trust_ratio(weight_norm, below, eta)


def lars(
    grad: Tensor, weight: Tensor | None, v: Tensor, lr: float, mu: float, eta: float, eps: float, decay: float,
    lr_in_momentum: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(step, v') of LARS."""
    if weight is not None:
        ratio = lars_ratio(weight.norm(2), grad.norm(2), eta, eps, decay)
        grad = torch.add(grad, weight, alpha=decay) * ratio
    v = torch.add(grad * lr if lr_in_momentum else grad, v, alpha=mu)
    return (v.clone() if lr_in_momentum else v * lr), v


def lamb(
    grad: Tensor, weight: Tensor | None, m: Tensor, v: Tensor, t: int, lr: float, betas: tuple[float, float],
    eps: float, decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(step, m', v') of LAMB."""
    r, m, v = adamw(grad, m, v, t, betas, eps)
    if weight is None:
        return r.mul_(lr), m, v
    r.add_(weight, alpha=decay)
    return r.mul_(trust_ratio(weight.norm(2), r.norm(2)) * lr), m, v
