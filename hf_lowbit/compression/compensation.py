"""What GPTQ leaves of a rounding error: the share of each column's error that later columns can't make good.

With H = X^T X = R R^T, R upper triangular in the order in which columns are rounded (`solvers/gptq.py`), the error of
the outputs is sum_j R_jj^2 e_j^2, where e_j is how far column j is rounded from where compensation has moved it. e_j
is about as large as without compensation, where the same error counts H_jj. So

    share_j = R_jj^2 / H_jj,    between 0 and 1

turns what rounding alone would cost into what it costs with compensation, and no weight has to be solved for it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..nn.targets import Target
from .calls import forward, undisturbed
from .layer_stage import SOLVED_KINDS
from .solvers.gptq import Factor, factorize
from .statistics import Accumulator, watch_inputs


# H of as many layers as this are summed in one pass over the data
MOST_BYTES = 512 << 20


@torch.no_grad()
def shares(model: nn.Module, targets: list[Target], batches: list[dict]) -> dict[str, Tensor]:
    """{name of a target: its share of each column, float32 [K]}; only of those that GPTQ rounds and that a token
    reached. `model` is the dense one and is not changed.

    Raises ValueError naming the layer whose inputs hold NaN or infinity.
    """
    found: dict[str, Tensor] = {}
    solved = [t for t in targets if t.kind in SOLVED_KINDS]
    with undisturbed(model), torch.no_grad():
        for part in logging.tqdm(_parts(solved), desc="Measuring compensation"):
            modules = {t.module_name: t.module for t in part}
            names = {t.module_name: t.name for t in part}
            sums = Accumulator()
            for batch in batches:
                with watch_inputs(modules) as seen:
                    forward(model, batch)
                sums.add(seen, None, batch)
            for inputs in sums.groups():
                factor = factorize(inputs.hessian)
                if factor is not None:
                    share = _share(factor, inputs.hessian.diagonal())
                    found |= {names[name]: share for name in inputs.names}
    return found


def _share(factor: Factor, diagonal: Tensor) -> Tensor:
    """R_jj^2 / H_jj in the order of the columns. The pivots are of the damped H, and may be a little above."""
    left = torch.empty_like(diagonal)
    left[factor.order] = factor.pivots.square()
    return left / torch.maximum(diagonal, left).clamp_min(1e-30)


def _parts(targets: list[Target]) -> list[list[Target]]:
    """Consecutive targets whose H, one each, stay within MOST_BYTES."""
    parts: list[list[Target]] = []
    left = 0
    for target in targets:
        size = 4 * target.packed.in_features**2
        if not parts or size > left:
            parts.append([])
            left = MOST_BYTES
        parts[-1].append(target)
        left -= size
    return parts
