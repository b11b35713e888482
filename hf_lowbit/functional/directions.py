"""What optimizers do before they touch a weight: from gradient and moments to the direction u of w' = w - lr * u.

Each function takes float32 tensors of equal shape and returns (u, new moments...), changing nothing it is given. The
formulas are those of torch.optim, so that a low-bit weight moves on average exactly as torch would move a float one.

    adamw       m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) g^2,
                u = m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps)             Loshchilov and Hutter 2019
    lion        u = sign(b1 m + (1 - b1) g),  m' = b2 m + (1 - b2) g            Chen et al. 2023, algorithm 2
    momentum    m' = mu m + g (m' = g at t = 1),  u = m' (nesterov: g + mu m')  Sutskever et al. 2013, as in torch
    adafactor   R' = R + c (mean_k g^2 - R),  C' = C + c (mean_n g^2 - C),  c = t^decay,
                u = g / sqrt(max(R' C' / max(mean R', eps), eps^2)),  u / max(1, rms(u) / d)
                                                                           Shazeer and Stern 2018, algorithm 4

t counts from 1. The factored second moment of Adafactor is a row vector and a column vector for the whole matrix, so
it needs the whole matrix at once; the others work element by element. As in torch.optim.Adafactor, the step of a
matrix is also multiplied by max(eps2, rms(w)), the relative step size; that is the caller's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def adamw(
    grad: Tensor, m: Tensor, v: Tensor, t: int, betas: tuple[float, float], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(u, m', v') of Adam with decoupled weight decay; the decay itself is the caller's."""
    beta1, beta2 = betas
    m = torch.lerp(m, grad, 1 - beta1)
    v = (v * beta2).addcmul_(grad, grad, value=1 - beta2)
    scale = math.sqrt(1 - beta2**t)
    u = m / v.sqrt().add_(eps * scale)
    return u.mul_(scale / (1 - beta1**t)), m, v


def lion(grad: Tensor, m: Tensor, betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """(u, m') of Lion; u is -1, 0 or 1."""
    beta1, beta2 = betas
    return torch.lerp(m, grad, 1 - beta1).sign_(), torch.lerp(m, grad, 1 - beta2)


def momentum(grad: Tensor, m: Tensor, t: int, mu: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """(u, m') of SGD with momentum, without dampening."""
    m = grad.clone() if t == 1 else torch.add(grad, m, alpha=mu)
    return (torch.add(grad, m, alpha=mu) if nesterov else m.clone()), m


def adafactor(
    grad: Tensor, row: Tensor, column: Tensor, t: int, decay: float, eps: float, clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(u, R', C') of Adafactor without first moment. grad [N, K]; row [N, 1]; column [1, K]."""
    weight = t**decay
    square = grad * grad
    row = torch.lerp(row, square.mean(dim=1, keepdim=True), weight)
    column = torch.lerp(column, square.mean(dim=0, keepdim=True), weight)
    # mean R' is the mean square of all, which the product counts twice
    estimate = (row / row.mean().clamp_(min=eps)) * column
    u = grad * estimate.clamp_(min=eps * eps).rsqrt_()
    rms = u.norm(2) / math.sqrt(max(u.numel(), 1))
    return u.div_((rms / clip).clamp_(min=1.0)), row, column
