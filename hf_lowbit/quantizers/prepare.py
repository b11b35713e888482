"""`prepare_model_for_lowbit_training`: a low-bit model made ready for adapters on top, in one call.

What QLoRA (Dettmers et al. 2023, section 3) does before training: the base is frozen, norms and other vectors are
float32, the output layer's logits are formed as before, activations are recomputed in the backward pass, and the
embedding's output takes gradients so that checkpointed blocks have something to differentiate. PEFT's own
`prepare_model_for_kbit_training` is not for low-bit layers: it casts their stored scales to float32 and enables no
checkpointing for methods it does not know.
"""

from __future__ import annotations

import torch
from torch import nn

from ..nn.packed import LowBitModule


def prepare_model_for_lowbit_training(
    model: nn.Module,
    use_gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: dict | None = None,
    upcast_norms: bool = True,
) -> nn.Module:
    """Prepare a low-bit model for training adapters; call it before `get_peft_model`.

    Args:
        model: a model with low-bit layers. Changed in place.
        use_gradient_checkpointing: recompute activations in the backward pass (less memory, about a third more time).
        gradient_checkpointing_kwargs: for `model.gradient_checkpointing_enable`; {"use_reentrant": False} by default.
        upcast_norms: hold the weights of normalization layers in float32. Their output keeps the dtype of the model.

    Returns:
        `model`: no parameter of it takes gradients, the adapters to come do.

    Raises:
        TypeError: when `model` is no torch module. ValueError: when it has no low-bit layer, or can't recompute
        activations although it was asked for.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch module, got {type(model).__name__}.")
    if not any(isinstance(module, LowBitModule) for module in model.modules()):
        raise ValueError(
            f"`model` ({type(model).__name__}) has no low-bit layer: load it with a LowBitConfig first, or prepare a "
            "dense model with PEFT's `prepare_model_for_kbit_training`."
        )
    checkpoints = getattr(model, "supports_gradient_checkpointing", False)
    if use_gradient_checkpointing and not checkpoints:
        raise ValueError(
            f"`use_gradient_checkpointing`=True: {type(model).__name__} can't recompute activations; pass False."
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if upcast_norms:
        for module in model.modules():
            if is_norm(module):
                _upcast(module)
    if use_gradient_checkpointing:
        kwargs = {"use_reentrant": False} if gradient_checkpointing_kwargs is None else gradient_checkpointing_kwargs
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        model.enable_input_require_grads()
    return model


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is a normalization layer: a leaf with a weight vector and "norm" in its class's name."""
    weight = module._parameters.get("weight")
    leaf = next(module.children(), None) is None
    return leaf and weight is not None and weight.ndim == 1 and "norm" in type(module).__name__.lower()


def _upcast(module: nn.Module) -> None:
    """Float32 parameters, and an output in the dtype of the input, whatever the module's own forward makes of it."""
    if all(p is None or p.dtype == torch.float32 for p in module._parameters.values()):
        return
    module.to(torch.float32)
    module.register_forward_pre_hook(_widen)
    module.register_forward_hook(_narrow)


def _widen(module: nn.Module, args: tuple) -> tuple:
    module.__dict__["_hf_lowbit_input_dtype"] = args[0].dtype
    return (args[0].to(torch.float32), *args[1:])


def _narrow(module: nn.Module, args: tuple, output):
    dtype = module.__dict__.pop("_hf_lowbit_input_dtype")
    return output.to(dtype) if isinstance(output, torch.Tensor) else output
