"""`codes`: the integers behind a low-bit module, for users who want to see."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from .packed import LowBitModule


def codes(module: nn.Module, parameter: str | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scale and zero point of a low-bit module, in the orientation of its dense weight.

    The dense weight is `scale * (codes - zero_point)`, each group of `group_size` weights along the input sharing a
    scale.

    Args:
        module: a low-bit module, such as `model.model.layers[0].mlp.up_proj`.
        parameter: which weight, for modules with several (fused experts); may be omitted when there is one.

    Returns:
        codes int8, dense shape: [N, K] for linear layers and embeddings, [K, N] for GPT-2's Conv1D, [E, ...] for
        experts. scale bfloat16 or float32 [N, G] (Conv1D: [G, N]), G = 1 per channel, [1, 1] per tensor. zero_point
        int8 of the scale's shape, or None on symmetric grids.

    Raises:
        TypeError: when the module is not low-bit. ValueError: when `parameter` must be given or does not exist, or the
            weight is on the meta device and nobody knows its numbers. Weights that accelerate offloaded are fetched.
    """
    if not isinstance(module, LowBitModule) or not module.lowbit:
        raise TypeError(
            f"{type(module).__name__} is not low-bit: it has no codes. `hf_lowbit.report(model)` lists what is."
        )
    names = list(module.lowbit)
    if parameter is None:
        if len(names) > 1:
            raise ValueError(
                f"{type(module).__name__} holds several weights; say which: `parameter` is one of {names}."
            )
        parameter = names[0]
    if parameter not in module.lowbit:
        raise ValueError(f"`parameter`={parameter!r} is not low-bit in {type(module).__name__}; use one of {names}.")
    with _fetched(module, parameter):
        stored = (
            module.codes(parameter),
            module._parameters[f"{parameter}_scale"],
            module._parameters[f"{parameter}_zero_point"],
        )
        q, scale, zero_point = (None if tensor is None else tensor.detach() for tensor in stored)
    if module.lowbit[parameter].transposed:
        q, scale = q.transpose(-1, -2), scale.transpose(-1, -2)
        zero_point = None if zero_point is None else zero_point.transpose(-1, -2)
    return q, scale, zero_point


def _fetched(module: LowBitModule, parameter: str) -> AbstractContextManager:
    """While it is open, an offloaded module's tensors are in memory."""
    if not module._parameters[f"{parameter}_scale"].is_meta:
        return nullcontext()
    if getattr(module, "_hf_hook", None) is None:
        raise ValueError(f"`{parameter}` is on the meta device: {type(module).__name__} has no numbers yet.")
    from accelerate.utils import align_module_device

    return align_module_device(module, "cpu")
