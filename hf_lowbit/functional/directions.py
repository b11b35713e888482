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

Element by element rules are written with products, sums, quotients and roots that each round once, in a fixed order,
and not with torch's fused forms (`lerp`, `addcmul`, `alpha=`), whose last bit differs between the vectors of a tensor
and its remainder: so a compiled kernel can give the same bits (`update.py`). `Constants` are what they multiply with.

t counts from 1. The factored second moment of Adafactor is a row vector and a column vector for the whole matrix, so
it needs the whole matrix at once; the others work element by element. As in torch.optim.Adafactor, the step of a
matrix is also multiplied by max(eps2, rms(w)), the relative step size; that is the caller's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Constants(NamedTuple):
    """What an element-by-element rule multiplies with at one step; `rule` is its name."""

    rule: str
    beta1: float
    rest1: float = 0.0
    beta2: float = 0.0
    rest2: float = 0.0
    eps: float = 0.0
    factor: float = 1.0
    first: bool = False
    nesterov: bool = False


def adamw_constants(t: int, betas: tuple[float, float], eps: float) -> Constants:
    """sqrt(v' / c) + eps is (sqrt(v') + eps sqrt(c)) / sqrt(c), with c = 1 - b2^t."""
    beta1, beta2 = betas
    scale = math.sqrt(1 - beta2**t)
    return Constants("adamw", beta1, 1 - beta1, beta2, 1 - beta2, eps * scale, scale / (1 - beta1**t))


def lion_constants(betas: tuple[float, float]) -> Constants:
    return Constants("lion", betas[0], 1 - betas[0], betas[1], 1 - betas[1])


def momentum_constants(t: int, mu: float, nesterov: bool) -> Constants:
    return Constants("sgd", mu, first=t == 1, nesterov=nesterov)


def adamw(
    grad: Tensor, m: Tensor, v: Tensor, t: int, betas: tuple[float, float], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(u, m', v') of Adam with decoupled weight decay; the decay itself is the caller's."""
    c = adamw_constants(t, betas, eps)
    m = (m * c.beta1).add_(grad * c.rest1)
    v = (v * c.beta2).add_((grad * grad).mul_(c.rest2))
    return (m / root(v).add_(c.eps)).mul_(c.factor), m, v


def root(x: Tensor) -> Tensor:
    """sqrt(x) of float32, correctly rounded. On CPUs torch's own is that of a vector library, and the last bit of one
    root in seventy is not."""
    return x.to(torch.float64).sqrt_().to(torch.float32) if x.device.type == "cpu" else x.sqrt()


def lion(grad: Tensor, m: Tensor, betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """(u, m') of Lion; u is -1, 0 or 1."""
    c = lion_constants(betas)
    u = (m * c.beta1).add_(grad * c.rest1).sign_()
    return u, (m * c.beta2).add_(grad * c.rest2)


def momentum(grad: Tensor, m: Tensor, t: int, mu: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """(u, m') of SGD with momentum, without dampening."""
    m = grad.clone() if t == 1 else (m * mu).add_(grad)
    return ((m * mu).add_(grad) if nesterov else m.clone()), m


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
