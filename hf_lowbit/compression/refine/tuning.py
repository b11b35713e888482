"""A low-bit module tree as tunable numbers: scales, zero points, rounding, and the small float parameters.

The dense module is run with weights formed from the codes (`torch.func.functional_call`), so that any architecture can
be tuned without a differentiable low-bit layer. Each weight is a leaf w = s (q - z) that is formed anew in each step;
its gradient G = dL/dw gives those of what it was formed from,

    dL/d(log s) = s sum_group G (q - z)        dL/dz = -s sum_group G        dL/dh ~ s G

where q = clamp(round(h)) and the rounding is passed straight through. h starts at the code plus what rounding left of
the dense weight, cut to half a step, so that tuning starts at exactly the codes that are stored. h and z move by the
sign of their gradient (SignRound, Cheng et al. 2023, eq. 4-6): with a rate that falls linearly from 1/steps to zero
h travels half a step at most. Scales, norms and biases move by Adam. Scales are rounded to their stored dtype in each
forward: what is tuned is what is stored.

Activations are not rounded while tuning, also where the layer rounds them to int8; what is kept is judged with them.

Shape legend: N out_features, K in_features, G groups a row; a leading E for fused experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...functional.grid import expand_groups, grid_of
from ...functional.packing import pack
from ...nn.packed import LowBitModule, PackedWeight
from ...nn.trainable import TrainableModule


# rounding to nearest would leave h = q + 0.5 to the parity of q
HALF = 0.499


class TunedWeight:
    """One packed weight as scales, zero points and, with `rounding`, positions between the codes."""

    def __init__(self, module: LowBitModule, name: str, dense: Tensor, rounding: bool):
        self.module, self.name, self.packed = module, name, module.lowbit[name]
        self.dtype, self.grid = dense.dtype, grid_of(self.packed.scheme.bits)
        self.scale_dtype = module._parameters[f"{name}_scale"].dtype
        self.start = module._parameters[f"{name}_scale"].detach().to(torch.float32)
        self.log_scale = nn.Parameter(torch.zeros_like(self.start))
        zero_point = module._parameters[f"{name}_zero_point"]
        self.zero = None if zero_point is None else zero_point.detach().to(torch.float32)
        self.codes = module.codes(name)
        self.position = self._positions(dense) if rounding else None
        self.leaf: Tensor | None = None

    def _positions(self, dense: Tensor) -> Tensor:
        """h [.., N, K]: code plus the rest of the dense weight in units of the scale."""
        rest = _oriented(dense.detach().to(torch.float32), self.packed) / self._spread(self.start)
        if self.zero is not None:
            rest = rest + self._spread(self.zero)
        codes = self.codes.to(torch.float32)
        return (rest - codes).clamp_(-HALF, HALF).add_(codes)

    def _spread(self, per_group: Tensor) -> Tensor:
        return expand_groups(per_group, self.packed.in_features, self.packed.scheme.block)

    def _gather(self, values: Tensor) -> Tensor:
        """Sum over the weights that share a scale: [.., N, K] -> the scale's shape."""
        shape = self.start.shape
        block = self.packed.scheme.block
        if shape[-1] > 1:
            short = -values.shape[-1] % block
            values = torch.nn.functional.pad(values, (0, short)) if short else values
            return values.unflatten(-1, (-1, block)).sum(-1)
        total = values.sum(-1, keepdim=True)
        return total if shape[-2] == total.shape[-2] else total.sum(-2, keepdim=True)

    def scale(self) -> Tensor:
        """The scale in its stored dtype."""
        limits = torch.finfo(self.scale_dtype)
        return (self.start * self.log_scale.detach().exp()).clamp(limits.tiny, limits.max).to(self.scale_dtype)

    def zero_point(self) -> Tensor | None:
        return None if self.zero is None else self.zero.round().clamp_(self.grid.qmin, self.grid.qmax)

    def form(self) -> Tensor:
        """The dense weight of the present state, a leaf that receives a gradient."""
        if self.position is not None:
            self.codes = self.position.round().clamp_(self.grid.qmin, self.grid.qmax).to(torch.int8)
        dense = self._centred().mul_(self._spread(self.scale().to(torch.float32))).to(self.dtype)
        dense = dense.transpose(-1, -2).contiguous() if self.packed.transposed else dense
        self.leaf = dense.requires_grad_()
        return self.leaf

    def _centred(self) -> Tensor:
        centred = self.codes.to(torch.float32)
        zero_point = self.zero_point()
        return centred if zero_point is None else centred.sub_(self._spread(zero_point))

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Take the leaf's gradient: signs move positions and zero points, the scale's gradient waits for Adam."""
        if self.leaf is None or self.leaf.grad is None:
            # an expert that no token reached
            self.log_scale.grad, self.leaf = None, None
            return
        gradient = _oriented(self.leaf.grad.to(torch.float32), self.packed)
        scale = self.scale().to(torch.float32)
        self.log_scale.grad = self._gather(gradient * self._centred()) * scale
        if self.position is not None:
            if self.zero is not None:
                self.zero += rate * self._gather(gradient).sign_()
            self.position -= gradient.sign().mul_(rate)
        self.leaf = None

    @torch.no_grad()
    def store(self) -> None:
        """Write the present state into the module, in the stored format."""
        self.form()
        self.leaf = None
        parameters = self.module._parameters
        weight = parameters[self.name]
        weight.copy_(pack(self.codes, self.grid).view(weight.shape))
        parameters[f"{self.name}_scale"].copy_(self.scale())
        if self.zero is not None:
            parameters[f"{self.name}_zero_point"].copy_(self.zero_point().to(torch.int8))


class Tuning:
    """All that is tuned in `lowbit`, a module whose dense form is `dense`. Raises ValueError when there is nothing.

    `rounding`: codes move too. `rate` is that of scales, norms and biases, relative to their size.
    """

    def __init__(self, lowbit: nn.Module, dense: nn.Module, *, rounding: bool, rate: float, steps: int):
        self.lowbit, self.dense, self.steps, self.taken = lowbit, dense, max(1, steps), 0
        self.weights: dict[str, TunedWeight] = {}
        self.floats: dict[str, nn.Parameter] = {}
        self.fixed: dict[str, Tensor] = {}
        dense_parameters = dict(dense.named_parameters(remove_duplicate=False))
        companions = set()
        seen: set[int] = set()
        for prefix, module in lowbit.named_modules():
            if isinstance(module, LowBitModule):
                start = f"{prefix}." if prefix else ""
                if isinstance(module, TrainableModule):
                    raise ValueError(f"`{prefix}` is a trainable weight: refine a model after `hf_lowbit.freeze`")
                companions |= {start + name for name in module.companions()}
                for name in module.lowbit:
                    if id(module._parameters[name]) not in seen:
                        seen.add(id(module._parameters[name]))
                        dense_weight = dense_parameters[start + name]
                        self.weights[start + name] = TunedWeight(module, name, dense_weight, rounding)
        self.targets = dict(lowbit.named_parameters())
        for name, parameter in self.targets.items():
            if name in companions or id(parameter) in seen or name not in dense_parameters:
                continue
            if parameter.ndim == 1 and parameter.is_floating_point():
                self.floats[name] = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
            else:
                self.fixed[name] = parameter.detach()
        if not self.weights:
            raise ValueError("nothing in it is low-bit")
        groups = [{"params": [w.log_scale for w in self.weights.values()], "lr": rate}]
        if self.floats:
            groups.append({"params": list(self.floats.values()), "lr": rate})
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
        self.rate = rate

    def run(self, *args, **kwargs):
        """A forward pass with the present weights, for a backward pass and `step`."""
        weights = {name: weight.form() for name, weight in self.weights.items()}
        weights |= {name: value.to(self.targets[name].dtype) for name, value in self.floats.items()}
        weights |= self.fixed
        return torch.func.functional_call(self.dense, weights, args, kwargs)

    def step(self, sign_rate: float) -> None:
        """One update after a backward pass; the rates fall linearly to zero over `steps`."""
        left = 1 - self.taken / self.steps
        for weight in self.weights.values():
            weight.step(sign_rate * left)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * left
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taken += 1

    @torch.no_grad()
    def store(self) -> None:
        """Write the present state into the low-bit module."""
        for weight in self.weights.values():
            weight.store()
        for name, value in self.floats.items():
            self.targets[name].copy_(value)

    def tensors(self) -> list[Tensor]:
        """Every tensor that `store` writes."""
        stored = []
        for weight in self.weights.values():
            names = (weight.name + suffix for suffix in weight.packed.tensors())
            stored += [weight.module._parameters[name] for name in names]
        return stored + [self.targets[name] for name in self.floats]


class Snapshot:
    """Copies of tensors, to be put back bit for bit."""

    def __init__(self, tensors: list[Tensor]):
        self.pairs = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, kept in self.pairs:
            tensor.copy_(kept)


def _oriented(dense: Tensor, packed: PackedWeight) -> Tensor:
    """The dense orientation as it is stored: [.., N, K]."""
    return dense.transpose(-1, -2) if packed.transposed else dense
