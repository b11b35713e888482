"""Products of several weights with one x, which is prepared once: y_i = x W_i^T + bias_i.

Preparing x is cutting it into the integers and the order in which a kernel multiplies it (linear.py). The weights
agree in everything but their number of rows, and each result has the bits of `linear` with that weight alone. Which
layers share their x is found in nn/sharing.py; `separate_products` and HF_LOWBIT_SHARE=0 keep every product to itself.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from .dispatch import Kernel, _environment, _key_of, choose, chosen, remember
from .linear import problem_of


ENVIRONMENT_VARIABLE = "HF_LOWBIT_SHARE"
# of one call; three layers share an attention's input, two that of a gate
MOST_WEIGHTS = 8
_key = _key_of(ENVIRONMENT_VARIABLE)
_separate: ContextVar[bool] = ContextVar("hf_lowbit_separate_products", default=False)


@contextmanager
def separate_products() -> Iterator[None]:
    """Inside the block every layer prepares its own input."""
    token = _separate.set(True)
    try:
        yield
    finally:
        _separate.reset(token)


def is_shared() -> bool:
    """Whether layers may share the preparation of their input: not in `separate_products`, nor with
    HF_LOWBIT_SHARE=0."""
    return not _separate.get() and (_key not in _environment or os.environ[ENVIRONMENT_VARIABLE] != "0")


def linear_several(
    x: Tensor,
    weights: Sequence[tuple[Tensor, Tensor, Tensor | None, Tensor | None]],
    bits: str | int,
    in_features: int,
    group_size: int | None,
    int8_activations: bool,
    key: Hashable,
) -> list[Tensor] | str:
    """[y_i [..., N_i]] for x [..., K] and the (weight, scale, zero point, bias) of each, or why no kernel does them at
    once.

    As `linear_now`: for calls that nothing records or traces. The weights agree in scheme, K and the presence of zero
    points. `key` stands for the schemes and shapes of the weights: calls with the same one have the same.
    """
    call = "several", key, x.shape, x.dtype, x.is_cpu or x.device.type
    known = chosen(call)
    if known is None:
        rows, problems, kernels = x.reshape(-1, x.shape[-1]), [], []
        for weight, scale, zero_point, _ in weights:
            flat = weight.view(weight.shape[-2], weight.shape[-1])
            problem = problem_of(rows, flat, scale, zero_point, bits, in_features, group_size or 0, int8_activations)
            problems.append(problem)
            kernels.append(choose(problem).kernel)
        known = (kernels[0] if all(kernel is kernels[0] for kernel in kernels) else None), tuple(problems)
        remember(call, *known)
    kernel, problems = known
    if kernel is None or kernel.several is None:
        return refusal(kernel)
    results = kernel.several(x, weights, problems)
    return "their scales have dtypes of which no product is made" if results is None else results


def refusal(kernel: Kernel | None) -> str:
    """Why `kernel` (None: not one for all) does not multiply several weights at once."""
    return "several kernels multiply them" if kernel is None else f"{kernel.name} prepares the input for each weight"
