"""What a saved config lists: each low-bit weight of a model, by name, with scheme and dense shape."""

from __future__ import annotations

from torch import nn

from ..configs.lowbit import LowBitConfig
from ..nn.packed import LowBitModule


def record_modules(model: nn.Module, config: LowBitConfig) -> None:
    """List the low-bit modules of a model in a config, with schemes and shapes."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, LowBitModule):
            for parameter, packed in module.lowbit.items():
                # fused experts are listed by parameter, whatever its name
                key = f"{name}.{parameter}" if packed.experts else name
                found[key.removeprefix(".")] = packed
    config.modules = {key: packed.scheme for key, packed in found.items()}
    config.shapes = {key: packed.shape for key, packed in found.items()}
