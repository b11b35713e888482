"""How much each weight suffers at each scheme.

With data: the second-order estimate of the loss that rounding adds, in nats a token,

    cost(W -> W') = 1/2 sum_ij F_ij (W'_ij - W_ij)^2,    F_ij = E[g_ij^2]

where g is the gradient of the log-likelihood of labels drawn from the model's own predictions (the diagonal of the
Fisher information; Kirkpatrick et al. 2017, eq. 3, use it for the same purpose: what may not move). Models without
logits use the last hidden state h (or their embeddings): gradients of v . h / |h| for random signs v, whose squares
estimate the relative error of h. Costs of all weights, tables and heads included, are then in one unit and may be
added.

`compensation.py` scales F by what GPTQ leaves of the error of each column, where GPTQ will round.

Without data: |W' - W|^2 / |W|^2 times the number of weights; a rough measure.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging

from ..configs.scheme import Scheme
from ..nn.packed import PackedWeight, dense_rows, quantize_weight
from ..nn.targets import Target
from .allocate import Option
from .calls import forward, outcome, undisturbed


BITS = (2, 3, 4, 8)


def candidates(
    group_size: int | str | None, symmetric: bool | None = None, activations: str | None = None,
    bits: Iterable[int] = BITS,
) -> list[Scheme]:  # fmt: skip
    """Schemes that a plan chooses from: one scale a channel suffices at 8 bits."""
    return [Scheme(width, None if width == 8 else group_size, symmetric, activations) for width in bits]


def fisher(model: nn.Module, targets: list[Target], batches: list[dict], seed: int = 0) -> dict[str, Tensor]:
    """Mean squared gradient a token of each target's weight, float32 in its shape. Changes nothing about the model.

    Holds one float32 copy of the targets' weights, and of their gradients while it runs.
    """
    weights = {t.name: t.module._parameters[t.parameter] for t in targets}
    wanted = {id(w) for w in weights.values()}
    before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    sums = {name: torch.zeros_like(w, dtype=torch.float32) for name, w in weights.items()}
    tokens, generator = 0, torch.Generator().manual_seed(seed)
    try:
        for p, _, _ in before:
            p.grad = None
            p.requires_grad_(id(p) in wanted)
        with undisturbed(model):
            for batch in logging.tqdm(batches, desc="Measuring sensitivities"):
                score, count = _score(forward(model, batch), batch.get("attention_mask"), generator)
                score.backward()
                tokens += count
                for name, weight in weights.items():
                    if weight.grad is not None:
                        sums[name] += weight.grad.to(torch.float32).square()
                for weight in weights.values():
                    weight.grad = None
    finally:
        for p, required, grad in before:
            p.requires_grad_(required)
            p.grad = grad
    found = {name: total / max(tokens, 1) for name, total in sums.items()}
    wide = [name for name, f in found.items() if not bool(torch.isfinite(f).all())]
    if wide:
        raise ValueError(
            f"the gradient of `{wide[0]}` on the calibration data is NaN or infinite in {weights[wide[0]].dtype}: "
            "load the model in float32 or bfloat16, or plan without data."
        )
    return _with_unreached(found)


def _with_unreached(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """A weight that no token reached (an expert, a branch) counts as the others do on average, not as worthless."""
    reached = [f for f in found.values() if bool(f.any())]
    if not reached:
        raise ValueError("no weight that is to be compressed has a gradient on the calibration data; plan without it.")
    average = sum(float(f.sum(dtype=torch.float64)) for f in reached) / sum(f.numel() for f in reached)
    return {name: f if bool(f.any()) else torch.full_like(f, average) for name, f in found.items()}


def _score(output, mask: Tensor | None, generator: torch.Generator) -> tuple[Tensor, int]:
    """The scalar whose gradient is squared, and how many tokens it is about."""
    is_logits, found = outcome(output)
    if not is_logits:
        # the parts of an output count as one token each: their sum has the gradient of all
        parts = [_kept_rows(values, mask) for values in found]
        signs = [torch.randint(0, 2, rows.shape, generator=generator).to(rows.device) * 2 - 1 for rows in parts]
        scores = [(F.normalize(rows, dim=-1) * s).sum() for rows, s in zip(parts, signs, strict=True)]
        return torch.stack(scores).sum(), len(parts[0])
    rows = _kept_rows(found[0], mask)
    drawn = torch.multinomial(rows.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0].to(rows.device)
    return F.cross_entropy(rows, drawn, reduction="sum"), len(rows)


def _kept_rows(values: Tensor, mask: Tensor | None) -> Tensor:
    """[..., D] -> float32 [tokens, D] without padding."""
    rows = values.reshape(-1, values.shape[-1]).float()
    if mask is not None and mask.numel() == len(rows):
        rows = rows[mask.reshape(-1).bool().to(rows.device)]
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("the model gives NaN or infinity on the calibration data; look at the data and the weights.")
    return rows


@torch.no_grad()
def options(target: Target, schemes: list[Scheme], importance: Tensor | None) -> list[Option]:
    """What each scheme would cost `target`; `importance` is its part of `fisher`, or None."""
    weight = target.module._parameters[target.parameter].detach()
    found = []
    for scheme in schemes:
        packed = PackedWeight(scheme, tuple(weight.shape), target.transposed)
        error = (_rounded(weight, packed) - weight.to(torch.float32)).square_()
        if importance is None:
            cost = float(error.sum() / weight.float().square().sum().clamp_min(1e-30)) * weight.numel()
        else:
            cost = 0.5 * float((error * importance).sum(dtype=torch.float64))
        found.append(Option(scheme, packed.bytes(), cost))
    return found


def _rounded(weight: Tensor, packed: PackedWeight) -> Tensor:
    """The numbers that are left of `weight` under a scheme, float32 in its shape."""
    stored = quantize_weight(weight, packed)
    dense = dense_rows(packed, stored[""], stored["_scale"], stored.get("_zero_point"), torch.float32)
    return dense.transpose(-1, -2) if packed.transposed else dense
