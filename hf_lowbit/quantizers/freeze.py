"""`freeze`: the end of direct training. What the forward pass multiplied with becomes the model, and nothing else
stays."""

from __future__ import annotations

from torch import nn

from ..nn.arming import disarm, trainable_modules


def freeze(model: nn.Module) -> nn.Module:
    """Turn the trainable low-bit weights of `model` into plain low-bit ones, in place, and return the model.

    Its logits stay equal bit for bit (in evaluation, as before the call). With `forward_bits="ternary"` the 8-bit
    codes give way to the 2-bit fields of their ternary form, in memory and in the file; otherwise the codes stay as
    they are. The result is what `LowBitConfig` makes: it saves, loads, exports and dequantizes like any low-bit
    model, and can be made trainable again with `hf_lowbit.quantize(model, DQTConfig(...))`.

    Args:
        model: a model with trainable low-bit weights; not one wrapped for several processes or compiled.

    Raises:
        TypeError: when `model` is not a torch module. ValueError: when it has no trainable low-bit weight.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch module, got {type(model).__name__}.")
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
