"""`LARS` and `LAMB` as torch optimizers, for float parameters: training with batches of thousands of samples.

With one learning rate for all layers, the rate that a large batch needs is too high for some of them. LARS and LAMB
give each layer a step in proportion to its weight's norm; the equations are in `functional/trust.py`. Biases and norms
(parameters with at most one dimension) are not adapted and not decayed, whatever `weight_decay` is, and neither are
those that `skip` names.

The norms of all layers are computed by one call (`torch._foreach_norm`), as Yamazaki et al. (arXiv 1903.12650) do on a
GPU, where one small kernel a layer would leave it idle. Norms are float32 for low-precision parameters, and nothing
waits for a result on the device.

In the Trainer:

    Trainer(..., optimizer_cls_and_kwargs=(lb.LARS, {"lr": args.learning_rate}))

Low-bit weights are moved by the same rules in direct updates: `DQTCallback(optimizer="lars")` (`training/rules.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..functional.trust import lars_ratio, trust_ratio
from ..nn.names import matches


class _LayerWise(Optimizer):
    """What LARS and LAMB share: which parameters are adapted, and steps over lists of tensors of one kind."""

    # an optimizer that was pickled comes back without them
    _skip: tuple[str, ...] = ()
    _matched: frozenset[str] = frozenset()

    def __init__(self, params, defaults: dict, skip: Iterable[str]):
        if isinstance(params, nn.Module):
            params = [(name, p) for name, p in params.named_parameters() if p.requires_grad]
        self._skip = (skip,) if isinstance(skip, str) else tuple(skip)
        super().__init__(params, defaults)
        unmatched = sorted(set(self._skip) - self._matched)
        if unmatched:
            raise ValueError(f"`skip` has {unmatched[0]!r}, which matches no parameter's name; remove or correct it.")

    def add_param_group(self, param_group: dict) -> None:
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names")
        if self._skip and not names:
            raise ValueError(
                "`skip` goes by names and these parameters have none: give a model or `model.named_parameters()`, or "
                "put them into a group with `adapt=False`."
            )
        adapted = []
        for position, parameter in enumerate(group["params"]):
            if parameter.is_complex():
                raise ValueError(f"{type(self).__name__} has no complex form; parameter {position} is complex.")
            found = {pattern for pattern in self._skip if matches(pattern, names[position])}
            self._matched = self._matched | found
            adapted.append(bool(group["adapt"]) and parameter.ndim > 1 and not found)
        group["adapted"] = adapted

    @torch.no_grad()
    def step(self, closure=None):
        """One step; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            kinds: dict[tuple, list[Tensor]] = {}
            for parameter, adapted in zip(group["params"], group["adapted"], strict=True):
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} takes no sparse gradients; use `sparse=False` embeddings."
                    )
                kinds.setdefault((adapted, parameter.dtype, parameter.device), []).append(parameter)
            for (adapted, _, _), parameters in kinds.items():
                self._move(group, parameters, [p.grad for p in parameters], adapted)
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        if any("adapted" not in group for group in state_dict["param_groups"]):
            raise ValueError(f"the state dict is not one of {type(self).__name__}; load one that it saved.")
        super().load_state_dict(state_dict)

    def _move(self, group: dict, weights: list[Tensor], grads: list[Tensor], adapted: bool) -> None:
        raise NotImplementedError

    def _buffers(self, weights: list[Tensor], name: str) -> list[Tensor]:
        """The state `name` of each weight, zero at first."""
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return [self.state[weight][name] for weight in weights]


class LARS(_LayerWise):
    """Layer-wise adaptive rate scaling (You et al. 2017): SGD with momentum, each layer at its own rate.

    Args:
        params: a model, or what torch optimizers take: parameters, (name, parameter) pairs, or groups of them. A group
            may set any of the options below but `skip`, and `adapt=False` for parameters at the plain rate.
        lr: learning rate. MLPerf trains ResNet-50 with 10 below 16k samples a batch, 25 below 32k, 31.2 above.
        momentum: at least 0 and below 1 (default 0.9).
        eta: the trust coefficient (default 0.001).
        eps: added to the denominator of the ratio (default 0, as in MLPerf).
        weight_decay: within the momentum, of adapted parameters only (default 0).
        lr_in_momentum: as the MLPerf reference has it (default True); False is the form of SGD in torch. They are the
            same at a constant rate, and differ under warmup and decay.
        skip: names of parameters that are not adapted, whole dotted parts ("lm_head") or "re:" patterns (default none;
            parameters with at most one dimension never are).

    Raises:
        ValueError: for values out of range, a `skip` that matches nothing or meets parameters without names.
    """

    def __init__(
        self, params, lr: float, momentum: float = 0.9, eta: float = 0.001, eps: float = 0.0,
        weight_decay: float = 0.0, lr_in_momentum: bool = True, skip: Iterable[str] = (),
    ):  # fmt: skip
        options = {"lr": lr, "momentum": momentum, "eta": eta, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "lr_in_momentum": lr_in_momentum, "adapt": True}, skip)

    def _move(self, group, weights, grads, adapted):
        lr, decay = group["lr"], group["weight_decay"]
        if adapted:
            ratios = lars_ratio(_norms(weights), _norms(grads), group["eta"], group["eps"], decay)
            if decay:
                grads = torch._foreach_add(grads, weights, alpha=decay)
            grads = torch._foreach_mul(grads, _like(ratios, weights))
        buffers = self._buffers(weights, "momentum_buffer")
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, grads if not group["lr_in_momentum"] else torch._foreach_mul(grads, lr))
        torch._foreach_add_(weights, buffers, alpha=-1.0 if group["lr_in_momentum"] else -lr)


class LAMB(_LayerWise):
    """Layer-wise adaptive moments (You et al. 2020): Adam's direction, as long as the layer's weight times the rate.

    Args:
        params, skip: as for `LARS`.
        lr: learning rate (a first guess is 0.001 to 0.01; a step moves each layer by that share of its norm).
        betas: of the moments, each at least 0 and below 1 (default 0.9 and 0.999).
        eps: added to the root of the second moment (default 1e-6).
        weight_decay: within the direction, of adapted parameters only (default 0).

    Raises:
        ValueError: as for `LARS`.
    """

    def __init__(
        self, params, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.0, skip: Iterable[str] = (),
    ):  # fmt: skip
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": True}
        super().__init__(params, options, skip)

    def _move(self, group, weights, grads, adapted):
        (beta1, beta2), eps = group["betas"], group["eps"]
        first, second = self._buffers(weights, "exp_avg"), self._buffers(weights, "exp_avg_sq")
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        roots = torch._foreach_sqrt(second)
        # a parameter may be younger than its group, so that each has its own count
        counts = [self._count(weight) for weight in weights]
        torch._foreach_div_(roots, [math.sqrt(1 - beta2**t) for t in counts])
        torch._foreach_add_(roots, eps)
        steps = torch._foreach_div(first, roots)
        torch._foreach_div_(steps, [1 - beta1**t for t in counts])
        if adapted:
            if group["weight_decay"]:
                torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
            ratios = trust_ratio(_norms(weights), _norms(steps))
            torch._foreach_mul_(steps, _like(ratios, weights))
        torch._foreach_add_(weights, steps, alpha=-group["lr"])

    def _count(self, weight: Tensor) -> int:
        self.state[weight]["step"] = self.state[weight].get("step", 0) + 1
        return self.state[weight]["step"]


def _norms(tensors: list[Tensor]) -> Tensor:
    """float32 [n]: the 2-norm of each (float64 for float64 tensors)."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))


def _like(ratios: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """One scalar tensor a weight, in the weights' dtype."""
    return list(ratios.to(weights[0].dtype).unbind())


def _check(group: dict) -> None:
    """Raise ValueError for options out of range."""
    for name in ("lr", "weight_decay", "eps", "eta"):
        value = group.get(name, 0.0)
        if isinstance(value, Tensor) or not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise ValueError(f"`{name}`={value!r} must be a finite number of at least 0.")
    if not 0 <= group.get("momentum", 0.0) < 1:
        raise ValueError(f"`momentum`={group['momentum']!r} must be at least 0 and below 1.")
    betas = group.get("betas", (0.0, 0.0))
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"`betas`={betas!r} must be two numbers of at least 0 and below 1.")
