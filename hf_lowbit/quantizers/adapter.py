"""Adapter layers of PEFT on low-bit layers: `merge` and `unmerge` that know what the codes stand for.

PEFT's own layers read `base_layer.weight` as numbers. On codes that is garbage: at 8 bits a safe merge adds the
adapter to the codes, casts back to int8, and so drops it. An adapter layer over a low-bit layer gets a class of ours,
`LowBit<Class>(LowBitAdapter, <Class>)`, whose merge makes the layer dense in float32, lets PEFT's own merge run on
that, and keeps the result dense or puts it back on its grid (`merging`). The packed tensors are kept aside, so that
`unmerge` brings back the very same ones; no arithmetic undoes anything.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import nn
from transformers.utils import logging

from ..nn.original import Original, become_dense, stored_weight
from ..nn.packed import LowBitModule, install
from .merging import Requantized, chosen_merge


logger = logging.get_logger(__name__)


class LowBitAdapter:
    """Mixin put in front of a PEFT layer class by `adapter_class`.

    `lowbit_name` is the module's name in the model, `lowbit_tied` says that its codes are another module's too, and
    the empty buffer `compute_like` carries the dtype that the layer has when it is dense.
    """

    lowbit_name: str
    lowbit_tied: bool
    # the low-bit layer while an adapter is merged into it
    _original: Original | None = None
    # PEFT's own merge is running on the dense layer: its inner calls of merge and unmerge are its own too
    _merging: bool = False

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters as `merge_as` says. Raises ValueError when the result is not finite or the weight is tied;
        then nothing has changed."""
        from peft.tuners.tuners_utils import check_adapters_to_merge

        base = self.get_base_layer()
        if self._merging or (self._original is None and not isinstance(base, LowBitModule)):
            return super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
        names = check_adapters_to_merge(self, adapter_names)
        names = [name for name in names if name in self._adapters_here()]
        if not names:
            return None
        if self.lowbit_tied:
            raise ValueError(
                f"`{self.lowbit_name}` shares its codes with another module: merging here would change both, or untie "
                "them. `model.dequantize()` first and merge then, or keep the adapter unmerged."
            )
        before = list(self.merged_adapters)
        original = self._original or Original.of(base)
        current = Original.of(base) if isinstance(base, LowBitModule) else None
        dense = None if current else dict(base._parameters)
        if self._original is not None:
            original.restore(base)
        try:
            self._merge_into_dense(base, original, [*before, *names], safe_merge)
        except BaseException:
            # as it was before the call
            if current is not None:
                current.restore(base)
            else:
                original.restore(base)
                become_dense(base, torch.float32)
                base._parameters.update(dense)
            self.merged_adapters[:] = before
            raise
        self._original = original
        return None

    def _merge_into_dense(self, base: nn.Module, original: Original, names: list[str], safe_merge: bool) -> None:
        bias = original.parameters.get("bias")
        # in float32, rounded once at the end
        become_dense(base, torch.float32)
        untouched = base.weight.detach().clone()
        self.merged_adapters[:] = []
        self._merging = True
        try:
            super().merge(safe_merge=safe_merge, adapter_names=names)
        finally:
            self._merging = False
        merged = base.weight.detach()
        tensors = [merged] if base._parameters.get("bias") is None else [merged, base.bias.detach()]
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            raise ValueError(
                f"`{self.lowbit_name}`: merging {names} gives NaN or infinity; the adapter is broken. Nothing was "
                "changed."
            )
        choice = chosen_merge()
        if choice is not None and choice.mode == "requantize":
            stored = original.requantize(merged)
            new_bias = base._parameters.get("bias")
            choice.losses.append(_loss(self.lowbit_name, original, stored, merged, untouched))
            original.restore(base)
            install(base, "weight", original.lowbit["weight"], stored)
            if bias is not None:
                base._parameters["bias"] = _like(new_bias, bias.dtype)
            return
        if choice is None:
            logger.warning_once(
                "Adapters are merged exactly: the low-bit layers they were merged into become dense. To stay low-bit, "
                'merge inside `with hf_lowbit.merge_as("requantize"):`.'
            )
        base._parameters["weight"] = _like(base.weight, self.compute_like.dtype)
        if bias is not None:
            base._parameters["bias"] = _like(base.bias, bias.dtype)

    def unmerge(self) -> None:
        """Bring back the low-bit layer, the very tensors it had before the first merge."""
        if self._merging or self._original is None:
            return super().unmerge()
        if not self.merged_adapters:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return None
        self._original.restore(self.get_base_layer())
        self._original = None
        self.merged_adapters[:] = []
        return None

    def _adapters_here(self) -> set[str]:
        """Names of the adapters that this layer has."""
        return {name for kind in self.adapter_layer_names for name in getattr(self, kind, ())}


def _like(tensor: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(tensor.detach().to(dtype), requires_grad=False)


def _loss(name: str, original: Original, stored: dict, merged: torch.Tensor, untouched: torch.Tensor) -> Requantized:
    lost = float((stored_weight(original.lowbit["weight"], stored) - merged).norm())
    weight, update = float(merged.norm()), float((merged - untouched).norm())
    return Requantized(name, lost / weight if weight else 0.0, 0.0 if lost == 0 else lost / update if update else
                       float("inf"))  # fmt: skip


@cache
def adapter_class(cls: type) -> type:
    """The class for an adapter layer of PEFT class `cls` over a low-bit layer."""
    body = {"__reduce_ex__": _reduce, "__module__": __name__, "_made_from": cls}
    return type(f"LowBit{cls.__name__}", (LowBitAdapter, cls), body)


def _reduce(self, protocol):
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    return _empty, (type(self)._made_from,), state


def _empty(cls: type) -> nn.Module:
    made = adapter_class(cls)
    return made.__new__(made)


def adapt(layer: nn.Module, name: str, tied: bool, dtype: torch.dtype) -> None:
    """Give a PEFT layer over a low-bit layer our class, in place."""
    if isinstance(layer, LowBitAdapter):
        return
    layer.__class__ = adapter_class(type(layer))
    layer.lowbit_name, layer.lowbit_tied = name, tied
    layer.register_buffer("compute_like", torch.empty(0, dtype=dtype), persistent=False)
