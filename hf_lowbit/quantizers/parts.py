"""Saving a part of a low-bit model on its own: the tower of a composite model, an encoder, the model inside a wrapper.

`from_pretrained` and `quantize` leave config and quantizer on the model that they were called with. What is below it
(or, where only a part was quantized, above it) is a `PreTrainedModel` with `save_pretrained` too, and packed tensors
without a config are a checkpoint nobody can read. So for the time of such a save the model gets both, with a record of
its own modules.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import wraps

from torch import nn
from transformers import PreTrainedModel

from ..configs.lowbit import LowBitConfig
from ..nn.block_sparse import BlockModule
from ..nn.masked import MaskedModule
from ..nn.packed import LowBitModule


def mark_parts(model: nn.Module, config: LowBitConfig) -> None:
    """Leave `config` on the pretrained models inside `model`, whose own configs are written into that of `model`."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module is not model:
            module.lowbit_part_of = config


def install_parts() -> None:
    """Wrap `PreTrainedModel.save_pretrained`; calling it again changes nothing."""
    save = PreTrainedModel.save_pretrained
    if getattr(save, "_hf_lowbit_parts", False):
        return

    @wraps(save)
    def save_pretrained(self, *args, **kwargs):
        with _as_a_whole(self):
            return save(self, *args, **kwargs)

    save_pretrained._hf_lowbit_parts = True
    PreTrainedModel.save_pretrained = save_pretrained


@contextlib.contextmanager
def _as_a_whole(model: PreTrainedModel) -> Iterator[None]:
    """While this is open, a model with low-bit layers but without a quantizer has one, and a config of its own."""
    config = None
    if getattr(model, "hf_quantizer", None) is None and _has_ours(model):
        config = _config_near(model)
    if config is None:
        yield
        return
    # imported here: the quantizer marks parts itself
    from .sparse import quantizer_for

    before = {name: model.__dict__.get(name) for name in ("config", "hf_quantizer", "_weight_conversions")}
    own = copy.deepcopy(config)
    # its calibration data and journal, if any, are the whole model's
    quantizer = quantizer_for(own, pre_quantized=False)
    quantizer.record(model)
    model.config = copy.deepcopy(model.config)
    model.config.quantization_config = quantizer.quantization_config
    model.hf_quantizer = quantizer
    model._weight_conversions = []
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del model.__dict__[name]
            else:
                setattr(model, name, value)


def _has_ours(model: nn.Module) -> bool:
    return any(isinstance(module, (LowBitModule, BlockModule, MaskedModule)) for module in model.modules())


def _config_near(model: PreTrainedModel) -> LowBitConfig | None:
    """The config the low-bit layers of `model` were made with: that of the model around it, or of one inside."""
    around = model.__dict__.get("lowbit_part_of")
    inside = (
        getattr(module, "hf_quantizer", None) for module in model.modules() if isinstance(module, PreTrainedModel)
    )
    found = [getattr(quantizer, "quantization_config", None) for quantizer in inside]
    return next((config for config in [around, *found] if isinstance(config, LowBitConfig)), None)
