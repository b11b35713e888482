"""A low-bit model has a config of its own: the one it was built from may build others, which are not low-bit."""

import copy

from torch import nn


def own_config(model: nn.Module) -> None:
    """Replace `model.config`, wherever the model's modules hold it or parts of it, by a copy."""
    copies: dict[int, object] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        own = copies.get(id(module.__dict__.get("config")))
        if own is not None:
            module.config = own
