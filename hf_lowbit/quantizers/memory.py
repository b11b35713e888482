"""`quantize`: the same conversion on a model that is already in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from ..configs.blast import BlastConfig
from ..configs.dqt import DQTConfig
from ..configs.lowbit import LowBitConfig
from ..nn.arming import trainable_modules
from ..nn.packed import LowBitModule
from ..nn.sparsify import sparse_modules
from ..nn.swap import flatten_head
from .calibrated import calibration_batches, check_plan, convert_dense
from .quantizer import LowBitQuantizer
from .sparse import BlastQuantizer, prune_further, prune_once
from .sparse_direct import start_direct
from .transitions import settle


def quantize(model: nn.Module, config: LowBitConfig | Mapping) -> nn.Module:
    """Convert `model` in place, layer by layer, and return it. With a `DQTConfig` its low-bit weights are trainable.

    What `from_pretrained(quantization_config=config)` does while loading, for a model built with `from_config` or
    loaded dense. The result saves, reloads and dequantizes like any low-bit model. A model that is low-bit already is
    made trainable by a `DQTConfig` of the same bits and groups; its codes stay.

    Args:
        model: any model; weights on any device, not on meta.
        config: a `LowBitConfig` or `DQTConfig`, or a dict of the fields of the former.

    Raises:
        TypeError: for another model or config type.
        ValueError: when the model is already quantized, a pattern matches nothing, nothing can be converted, nothing
            fits a planned size (the smallest is named), or a weight holds NaN or infinity (named; the model is then
            unchanged).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch module, got {type(model).__name__}.")
    if isinstance(config, Mapping):
        config = LowBitConfig.from_dict(dict(config))
    if not isinstance(config, LowBitConfig):
        raise TypeError(f"`config` must be a LowBitConfig or a dict of its fields, got {type(config).__name__}.")
    if config.sparse is not None:
        return _sparsify(model, config)
    if any(isinstance(module, LowBitModule) for module in model.modules()):
        if isinstance(config, DQTConfig):
            return _continue(model, config)
        raise ValueError("the model is already low-bit; call `model.dequantize()` first, and expect the loss of both.")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            f"the model is already quantized by {model.hf_quantizer.quantization_config.quant_method}; "
            "load it dense first."
        )
    missing = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if missing:
        raise ValueError(f"`{missing[0]}` is on the meta device: load or initialize the weights first.")
    check_plan(model, config)
    batches = calibration_batches(model, config)
    quantizer = LowBitQuantizer(config, pre_quantized=False)
    quantizer.quantization_config, targets = convert_dense(model, quantizer.quantization_config, batches)
    flatten_head(model)
    quantizer.make_trainable(model)
    quantizer.attach(model, targets)
    return model


def _sparsify(model: nn.Module, config: BlastConfig) -> nn.Module:
    """Let the layers of a dense or block-sparse model be pruned (further)."""
    if any(isinstance(module, LowBitModule) for module in model.modules()):
        raise ValueError("the model is low-bit: blocks of codes can't be pruned. Call `model.dequantize()` first.")
    if config.dequantize:
        raise ValueError("`dequantize`=True is for loading; call `model.dequantize()`.")
    if next(sparse_modules(model), None) is not None:
        prune_further(model, config)
        return model
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            f"the model is already quantized by {model.hf_quantizer.quantization_config.quant_method}; "
            "load it dense first."
        )
    missing = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if missing:
        raise ValueError(f"`{missing[0]}` is on the meta device: load or initialize the weights first.")
    quantizer = BlastQuantizer(config, pre_quantized=False)
    quantizer.arm(model)
    if config.one_shot:
        prune_once(model)
    start_direct(model, quantizer.quantization_config)
    quantizer.attach(model, [])
    return model


def _continue(model: nn.Module, config: DQTConfig) -> nn.Module:
    """Make a low-bit model trainable without touching a code."""
    if next(trainable_modules(model), None) is not None:
        raise ValueError("the model's low-bit weights are trainable already; call `hf_lowbit.freeze(model)` first.")
    quantizer = getattr(model, "hf_quantizer", None)
    if not isinstance(quantizer, LowBitQuantizer):
        raise ValueError(
            "the model has low-bit modules but no quantizer of hf_lowbit; load or quantize it as a whole."
        )
    stored = LowBitConfig.from_dict(quantizer.quantization_config.to_dict())
    for name, value in config.get_loading_attributes().items():
        setattr(stored, name, value)
    quantizer.quantization_config = settle(stored).config
    for module in model.modules():
        if isinstance(module, LowBitModule):
            activations = quantizer.quantization_config.activations
            module.lowbit = {
                name: replace(packed, scheme=replace(packed.scheme, activations=activations))
                for name, packed in module.lowbit.items()
            }
    quantizer.make_trainable(model)
    quantizer.record(model)
    quantizer.postprocess_config(model)
    return model
