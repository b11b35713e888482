"""How a checkpoint's config and the one passed at load become one: low-bit and trainable are one kind of checkpoint.

| checkpoint | asked for | result |
|---|---|---|
| low-bit | `DQTConfig` of its bits and groups | the codes as they are, trainable |
| trainable | nothing, or the `DQTConfig` it was written with | trainable, resumed |
| trainable | `LowBitConfig` of its forward pass | frozen: what `hf_lowbit.freeze` makes |
| block-sparse | nothing | live blocks, as they are |
| block-sparse | `BlastConfig` of its blocks | dense with zeros, to be pruned further |
| any | `dequantize=True` | dense weights |

Anything else is a conflict, and is refused in a sentence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..configs.dqt import DQTConfig
from ..configs.lowbit import LowBitConfig


class Settled(NamedTuple):
    """The config to load under, and whether to freeze what has been loaded."""

    config: LowBitConfig
    freeze: bool


def settle(config: LowBitConfig) -> Settled:
    """Settle what to do with a checkpoint's `config` that carries the request of the load (`requested`), if any.

    Raises ValueError with both values where the two can't be had together.
    """
    requested = getattr(config, "requested", None)
    if requested is None or config.dequantize:
        return Settled(config, False)
    if (requested.get("sparse") is None) != (config.sparse is None):
        _refuse(_kinds_differ(config))
    training = requested.get("training")
    if config.training is None and training is None:
        _refuse(config.conflict())
        return Settled(config, False)
    if training is None:
        _refuse(_difference(config.frozen(), requested, ("bits", "group_size", "activations")))
        return Settled(config, True)
    _refuse(_difference(config, requested, ("bits", "group_size")))
    if config.training is not None:
        _refuse(_difference(config, {**requested, **training}, ("forward_bits", "activations")))
        config.scale, config.grad_dtype = training["scale"], training["grad_dtype"]
        return Settled(config, False)
    settled = DQTConfig.continuing(config, training)
    activations = requested["activations"]
    settled.activations = activations
    settled.modules = {name: replace(scheme, activations=activations) for name, scheme in settled.modules.items()}
    settled.requested = requested
    return Settled(settled, False)


def _kinds_differ(config: LowBitConfig) -> str:
    if config.sparse is not None:
        return (
            "the checkpoint is block-sparse, and can't be made low-bit while it is loaded. Load it without "
            "`quantization_config`, or dense with BlastConfig(dequantize=True)."
        )
    return (
        "the checkpoint is low-bit, and blocks of codes can't be pruned. Load it with LowBitConfig(dequantize=True) "
        "and convert the dense model with hf_lowbit.quantize(model, BlastConfig(...))."
    )


def _difference(config: LowBitConfig, requested: dict, fields: tuple[str, ...]) -> str | None:
    wrong = [field for field in fields if getattr(config, field) != requested[field]]
    if not wrong:
        return None
    return (
        "the checkpoint is already low-bit, with "
        + ", ".join(f"`{field}`={getattr(config, field)!r}" for field in wrong)
        + ", but `quantization_config` asks for "
        + ", ".join(f"`{field}`={requested[field]!r}" for field in wrong)
        + ". Load it without `quantization_config`; or load it with `dequantize=True` and quantize the result again "
        "with hf_lowbit.quantize."
    )


def _refuse(conflict: str | None) -> None:
    if conflict is not None:
        raise ValueError(f"`quantization_config`: {conflict}")
