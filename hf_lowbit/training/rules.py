"""Optimizers as data: which moments one keeps, and how they and a gradient give a direction.

A `Rule` sees float32 tensors only. It knows nothing of codes, of how moments are stored, or of other processes, so one
rule serves low-bit weights, learned scales and float parameters alike. To add one, write a class with the members of
`Rule` and put it into `RULES`. A rule that needs the whole matrix at once (norms, factored moments) sets `whole`; a
rule whose step depends on the weight's size (Adafactor) overrides `rate`. A rule that needs the weight itself (LARS,
LAMB) is `layerwise` and gives `step` in place of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from ..functional import directions, trust


Moments = dict[str, Tensor]


class Rule(Protocol):
    """`moments`: name -> whether it may be negative. `vectors`: name -> dimension over which it is a mean (matrices
    only). `whole`: `direction` gets the whole matrix instead of rows of it."""

    moments: ClassVar[dict[str, bool]]
    vectors: ClassVar[dict[str, int]]
    whole: ClassVar[bool]

    def direction(self, grad: Tensor, moments: Moments, t: int) -> tuple[Tensor, Moments]:
        """u of w' = w - rate * u and the new moments, for step t = 1, 2, ...; changes nothing it is given."""

    def constants(self, t: int) -> directions.Constants | None:
        """What a fused kernel (`functional/update.py`) multiplies with at step t; None for rules that none has."""

    def rate(self, lr: float, t: int, weight_rms: Callable[[], float], u: Tensor) -> float:
        """The factor of u; `weight_rms()` is the weight's root mean square, computed when asked for."""


class _Elementwise:
    """What rules share that work element by element at the learning rate."""

    vectors: ClassVar[dict[str, int]] = {}
    whole: ClassVar[bool] = False

    def rate(self, lr, t, weight_rms, u):
        return lr


@dataclass(frozen=True)
class AdamW(_Elementwise):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    moments: ClassVar[dict[str, bool]] = {"m": True, "v": False}

    def __post_init__(self):
        _check_betas(self.betas)

    def direction(self, grad, moments, t):
        u, m, v = directions.adamw(grad, moments["m"], moments["v"], t, self.betas, self.eps)
        return u, {"m": m, "v": v}

    def constants(self, t):
        return directions.adamw_constants(t, self.betas, self.eps)


@dataclass(frozen=True)
class Lion(_Elementwise):
    """Sign of an interpolated momentum (Chen et al. 2023); wants a learning rate 3 to 10 times below AdamW's."""

    betas: tuple[float, float] = (0.9, 0.99)
    moments: ClassVar[dict[str, bool]] = {"m": True}

    def __post_init__(self):
        _check_betas(self.betas)

    def direction(self, grad, moments, t):
        u, m = directions.lion(grad, moments["m"], self.betas)
        return u, {"m": m}

    def constants(self, t):
        return directions.lion_constants(self.betas)


@dataclass(frozen=True)
class Momentum(_Elementwise):
    """SGD with momentum, as in torch."""

    momentum: float = 0.9
    nesterov: bool = False
    moments: ClassVar[dict[str, bool]] = {"m": True}

    def __post_init__(self):
        if not 0 <= self.momentum < 1:
            raise ValueError(f"`momentum`={self.momentum!r} must be at least 0 and below 1.")

    def direction(self, grad, moments, t):
        u, m = directions.momentum(grad, moments["m"], t, self.momentum, self.nesterov)
        return u, {"m": m}

    def constants(self, t):
        return directions.momentum_constants(t, self.momentum, self.nesterov)


@dataclass(frozen=True)
class Adafactor:
    """Factored second moments, no first (Shazeer and Stern 2018), as in torch.optim.Adafactor: its step is relative to
    the weight's size. Vectors keep their whole second moment."""

    beta2_decay: float = -0.8
    eps: tuple[float, float] = (1.1920928955078125e-07, 1e-3)
    clip: float = 1.0
    moments: ClassVar[dict[str, bool]] = {}
    vectors: ClassVar[dict[str, int]] = {"row": 1, "column": 0}
    whole: ClassVar[bool] = True

    def direction(self, grad, moments, t):
        arguments = (t, self.beta2_decay, self.eps[0], self.clip)
        u, row, column = directions.adafactor(grad, moments["row"], moments["column"], *arguments)
        return u, {"row": row, "column": column}

    def constants(self, t):
        return None

    def rate(self, lr, t, weight_rms, u):
        return max(self.eps[1], weight_rms()) * min(lr, t**-0.5)


class _Layerwise:
    """What rules share whose step depends on the size of the layer's weight; no fused kernel has one."""

    vectors: ClassVar[dict[str, int]] = {}
    whole: ClassVar[bool] = True
    layerwise: ClassVar[bool] = True

    def constants(self, t):
        return None


@dataclass(frozen=True)
class Lars(_Layerwise):
    """Momentum at a rate of each layer's own (You et al. 2017): under stochastic rounding every layer then changes a
    similar share of its codes in a step. Its learning rate is of the order of 10 (`functional/trust.py`)."""

    momentum: float = 0.9
    eta: float = 0.001
    eps: float = 0.0
    lr_in_momentum: bool = True
    moments: ClassVar[dict[str, bool]] = {"m": True}

    def __post_init__(self):
        if not 0 <= self.momentum < 1:
            raise ValueError(f"`momentum`={self.momentum!r} must be at least 0 and below 1.")
        _check_positive("eta", self.eta, zero=False)
        _check_positive("eps", self.eps)

    def step(self, grad, weight, moments, t, lr, decay):
        """(step of w' = w - step, moments); `weight` is None where the layer is not adapted. Both whole."""
        options = (lr, self.momentum, self.eta, self.eps, decay, self.lr_in_momentum)
        step, m = trust.lars(grad, weight, moments["m"], *options)
        return step, {"m": m}


@dataclass(frozen=True)
class Lamb(_Layerwise):
    """Adam's direction, as long as the layer's weight times the learning rate (You et al. 2020)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    moments: ClassVar[dict[str, bool]] = {"m": True, "v": False}

    def __post_init__(self):
        _check_betas(self.betas)
        _check_positive("eps", self.eps)

    def step(self, grad, weight, moments, t, lr, decay):
        """As `Lars.step`."""
        step, m, v = trust.lamb(grad, weight, moments["m"], moments["v"], t, lr, self.betas, self.eps, decay)
        return step, {"m": m, "v": v}


RULES: dict[str, type] = {
    "adamw": AdamW,
    "lion": Lion,
    "sgd": Momentum,
    "adafactor": Adafactor,
    "lars": Lars,
    "lamb": Lamb,
}


def make_rule(name: str, options: dict) -> Rule:
    """The rule `name` with its options; ValueError and TypeError name what is wrong with either."""
    if name not in RULES:
        raise ValueError(f"`optimizer`={name!r} is not supported; use one of {sorted(RULES)}.")
    fields = RULES[name].__dataclass_fields__
    unknown = sorted(set(options) - set(fields))
    if unknown:
        raise TypeError(f"`optimizer`={name!r} has no option `{unknown[0]}`; it has {list(fields)}.")
    return RULES[name](**options)


def _check_positive(name: str, value: float, zero: bool = True) -> None:
    if not (0 <= value < math.inf) or (value == 0 and not zero):
        raise ValueError(f"`{name}`={value!r} must be a finite number {'of at least' if zero else 'above'} 0.")


def _check_betas(betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"`betas`={betas!r} must be two numbers of at least 0 and below 1.")
