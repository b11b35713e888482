"""`freeze`: the end of direct training. What the forward pass multiplied with becomes the model, and nothing else
stays."""

from __future__ import annotations

from torch import nn

from ..configs.blast import kept_blocks
from ..nn.arming import disarm, trainable_modules
from ..nn.masked_weight import MaskedWeight
from ..nn.sparsify import masked_modules, pack_blocks


def freeze(model: nn.Module) -> nn.Module:
    """Turn the trainable low-bit weights of `model` into plain low-bit ones, in place, and return the model.

    Its logits stay equal bit for bit (in evaluation, as before the call). With `forward_bits="ternary"` the 8-bit
    codes give way to the 2-bit fields of their ternary form, in memory and in the file; otherwise the codes stay as
    they are. The result is what `LowBitConfig` makes: it saves, loads, exports and dequantizes like any low-bit
    model, and can be made trainable again with `hf_lowbit.quantize(model, DQTConfig(...))`.

    Of a model that is being pruned (`BlastConfig`) the live blocks are kept, and the zeros go; `bits` and `rest` of
    its config are applied.

    Args:
        model: a model with trainable low-bit weights; not one wrapped for several processes or compiled.

    Raises:
        TypeError: when `model` is not a torch module. ValueError: when it has no trainable low-bit weight.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch module, got {type(model).__name__}.")
    masked = dict(masked_modules(model))
    if masked:
        return _freeze_masks(model, masked)
    if next(trainable_modules(model), None) is None:
        raise ValueError(
            f"{type(model).__name__} has no trainable low-bit weight to freeze; `hf_lowbit.report(model)` lists what "
            "it has."
        )
    disarm(model)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.quantization_config = quantizer.quantization_config.frozen()
        quantizer.record(model)
        quantizer.postprocess_config(model)
        quantizer.tag(model)
    return model


def _freeze_masks(model: nn.Module, masked: dict[str, MaskedWeight]) -> nn.Module:
    """Keep live blocks only."""
    dense = [
        name
        for name, weight in masked.items()
        if kept_blocks(weight.target, weight.layout.pool) < weight.layout.pool and bool(weight.mask.all())
    ]
    if dense:
        raise ValueError(
            f"no block of `{dense[0]}` has been pruned: there is nothing to freeze. Train with "
            "`Trainer(callbacks=[hf_lowbit.BlastCallback()])`, which packs the model when it is done."
        )
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.pack(model)
    else:
        for module in masked.values():
            pack_blocks(module)
    return model
