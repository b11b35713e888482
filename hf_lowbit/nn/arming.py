"""Making the low-bit layers of a model trainable, and plain again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from .classes import dense_class, kind_of, lowbit_class
from .packed import LowBitModule
from .trainable import TrainableModule, Training, hold_codes, release_codes


# kinds of low-bit layers that have a trainable form
ARMABLE = ("linear", "conv1d")


def trainable_modules(model: nn.Module) -> Iterator[tuple[str, TrainableModule]]:
    """(name, module) of the model's trainable low-bit layers, each once."""
    for name, module in model.named_modules():
        if isinstance(module, TrainableModule):
            yield name, module


def arm(model: nn.Module, training: Training, dtype: torch.dtype, names: set[str] | None = None) -> list[str]:
    """Make the low-bit linear layers trainable (`names`: only these). Their gradients will have `dtype`.

    Returns the names. Layers whose packed weight is shared with another module are left as they are.
    """
    lowbit = [(name, m) for name, m in model.named_modules() if isinstance(m, LowBitModule)]
    holders: dict[int, int] = {}
    for _, module in lowbit:
        for parameter in module.lowbit:
            key = id(module._parameters[parameter])
            holders[key] = holders.get(key, 0) + 1
    armed = []
    for name, module in lowbit:
        wanted = kind_of(module) in ARMABLE and (names is None or name in names)
        if wanted and holders[id(module._parameters["weight"])] == 1:
            module.__class__ = lowbit_class(dense_class(module), f"trainable-{kind_of(module)}", ("weight",))
            hold_codes(module, training, dtype)
            armed.append(name)
    return armed


def disarm(model: nn.Module) -> list[str]:
    """Turn trainable layers into plain low-bit ones that compute the same, bit for bit. Returns the names."""
    names = []
    for name, module in trainable_modules(model):
        kind = kind_of(module).removeprefix("trainable-")
        dense = dense_class(module)
        release_codes(module)
        module.__class__ = lowbit_class(dense, kind, ("weight",))
        names.append(name)
    return names
