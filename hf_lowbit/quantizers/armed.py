"""Codes that a `DQTConfig` makes trainable, and the dtype of their gradients."""

from __future__ import annotations

import torch

from ..configs.dqt import DQTConfig
from ..nn.arming import arm
from ..nn.trainable import Training


def arm_codes(model, config: DQTConfig) -> list[str]:
    """Make the low-bit linear weights of a model trainable as `config` says. Returns the names."""
    return arm(model, Training(config.forward_bits, config.scale == "learned"), gradient_dtype(model, config))


def gradient_dtype(model, config: DQTConfig) -> torch.dtype:
    """Of the gradients of codes: the config's, the model's, or torch's default where nothing is floating."""
    own = getattr(torch, config.grad_dtype) if config.grad_dtype else getattr(model, "dtype", None)
    return own or torch.get_default_dtype()
