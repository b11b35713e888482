"""What merging an adapter into a low-bit layer means, and the choice between the two ways.

PEFT's merge adds an adapter to the weight of its layer: W' = W + BA for LoRA. A low-bit layer can keep that in two
forms:

- "dequantize": the layer becomes dense and holds W' in the model's dtype, formed in float32 and rounded once. Nothing
  of the adapter is lost; the memory is that of a dense layer.
- "requantize": W' goes back on the layer's own scheme. The layer stays as small as it was; what rounding lost is
  reported, layer by layer, as |Q(W') - W'| / |W'| and, since the update is small beside the weight, as
  |Q(W') - W'| / |W' - W| too. A value near or above 1 there says that the rounding weighs as much as the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


MODES = ("dequantize", "requantize")


@dataclass(frozen=True)
class Requantized:
    """What putting one merged weight back on its grid lost, in Frobenius norms.

    `of_weight` = |Q(W') - W'| / |W'|, `of_update` = |Q(W') - W'| / |W' - W| (0.0 when nothing was lost, infinite when
    something was although the adapter changes nothing).
    """

    module: str
    of_weight: float
    of_update: float


@dataclass(frozen=True)
class _Choice:
    mode: str
    losses: list[Requantized]


_choice: ContextVar[_Choice | None] = ContextVar("hf_lowbit_merge_as", default=None)


@contextmanager
def merge_as(mode: str) -> Iterator[list[Requantized]]:
    """Say how PEFT's merges inside this context treat low-bit layers.

        with lb.merge_as("requantize") as losses:
            model = model.merge_and_unload(safe_merge=True)

    Args:
        mode: "dequantize" (also what happens outside of the context): merged layers become dense and exact.
            "requantize": they stay on the scheme they had, with codes that hold the adapter as well as the grid can.

    Yields:
        a list that fills with one entry a requantized layer: `module`, `of_weight`, `of_update` (relative errors).

    Raises:
        ValueError: for another `mode`.
    """
    if mode not in MODES:
        raise ValueError(f'`mode`={mode!r} is no way to merge; use "dequantize" or "requantize".')
    choice = _Choice(mode, [])
    token = _choice.set(choice)
    try:
        yield choice.losses
    finally:
        _choice.reset(token)


def chosen_merge() -> _Choice | None:
    """The choice of the innermost `merge_as`, None outside of one."""
    return _choice.get()
