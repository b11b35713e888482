"""Making transformers count a low-bit model right: logical parameters, and the dtype it computes in.

`num_parameters()` would count packed bytes and scales, and `dtype` might answer with the dtype of a scale. Both are
wrapped on `PreTrainedModel`, once, and behave as before for models without low-bit layers.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..nn.arming import trainable_modules
from ..nn.block_sparse import SUFFIXES, BlockWeight
from ..nn.packed import LowBitModule
from ..nn.sparsify import weights_of
from ..nn.trainable import TrainableModule


def install_accounting() -> None:
    """Wrap `num_parameters`, `get_memory_footprint` and `dtype` of `PreTrainedModel`; calling it again changes
    nothing."""
    if getattr(PreTrainedModel.num_parameters, "_hf_lowbit", False):
        return
    count, dtype = PreTrainedModel.num_parameters, PreTrainedModel.dtype

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        total = count(self, only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
        return total + _difference(self, only_trainable, exclude_embeddings)

    num_parameters.__doc__ = count.__doc__
    num_parameters._hf_lowbit = True
    PreTrainedModel.num_parameters = num_parameters
    footprint = PreTrainedModel.get_memory_footprint

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        # a trainable weight reports a float dtype and its dense shape, and holds neither
        slots = {id(m._parameters["weight"]): m for _, m in trainable_modules(self)}
        over = sum(m.weight.nelement() * m.weight.element_size() - m.stored().nelement() for m in slots.values())
        return footprint(self, return_buffers) - over

    get_memory_footprint.__doc__ = footprint.__doc__
    PreTrainedModel.get_memory_footprint = get_memory_footprint
    PreTrainedModel.dtype = property(lambda self: _dtype(self) or dtype.fget(self), doc=dtype.__doc__)


def _difference(model: PreTrainedModel, only_trainable: bool, exclude_embeddings: bool) -> int:
    """Logical weights minus stored elements, over the packed parameters that the plain count includes."""
    difference, seen = 0, set()
    for module in model.modules():
        if isinstance(module, TrainableModule):
            # its weight has the dense shape already
            scales = [module._parameters[name] for name in module.companions()]
            difference -= sum(t.numel() for t in scales if t.requires_grad or not only_trainable)
            continue
        blocks = [weight for weight in weights_of(module).values() if isinstance(weight, BlockWeight)]
        for weight in blocks:
            stored = [weight.held(suffix) for suffix in SUFFIXES]
            counted = [t for t in stored if t is not None and (t.requires_grad or not only_trainable)]
            # of what trains, the live weights
            logical = weight.layout.parameters
            difference += (sum(t.numel() for t in counted[:1]) if only_trainable else logical) - sum(
                t.numel() for t in counted
            )
        if blocks:
            continue
        if not isinstance(module, LowBitModule) or only_trainable:
            # packed weights without a slot take no gradient, so the plain count left them out
            continue
        table = isinstance(module, torch.nn.Embedding)
        for name, packed in module.lowbit.items():
            stored = [module._parameters[name + suffix] for suffix in packed.tensors()]
            if id(stored[0]) in seen:
                continue
            seen.add(id(stored[0]))
            if table and exclude_embeddings:
                # the plain count skips `weight` but not the scales beside it
                difference -= sum(tensor.numel() for tensor in stored[1:])
            else:
                difference += packed.parameters - sum(tensor.numel() for tensor in stored)
    return difference


def _dtype(model: PreTrainedModel) -> torch.dtype | None:
    """Dtype of the first dense floating parameter, else of a low-bit table's output; None for models without low-bit
    layers."""
    lowbit, first = False, None
    for module in model.modules():
        companions: list[str] = []
        if isinstance(module, LowBitModule):
            lowbit, companions = True, module.companions()
            if hasattr(module, "output_like"):
                first = first or module.output_like.dtype
        else:
            scales = [
                n for n, w in weights_of(module).items() if w.layout.bits is not None and isinstance(w, BlockWeight)
            ]
            if scales:
                lowbit, companions = True, [f"{name}_scale" for name in scales]
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and name not in companions:
                first = first or parameter.dtype
        if lowbit and first is not None:
            return first
    return None
