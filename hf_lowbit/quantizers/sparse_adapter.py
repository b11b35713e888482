"""LoRA on block-sparse layers: the adapter trains beside the blocks, and is never merged into them.

W + BA is dense: a merge would give back every block that was removed, or drop the part of the adapter that lies in
dead ones. Both are refused in a sentence.
"""

from __future__ import annotations

from functools import cache

from torch import nn


class BlockSparseAdapter:
    """Mixin put in front of a PEFT layer class by `adapter_class`; `sparse_name` is the module's name in the model."""

    sparse_name: str

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse while the base layer is block-sparse; a merge as usual once it is dense."""
        from ..nn.sparsify import SparseModule

        if isinstance(self.get_base_layer(), SparseModule):
            raise ValueError(
                f"`{self.sparse_name}` is block-sparse: merging an adapter into it would make it dense. Keep the "
                "adapter unmerged, or call `model.dequantize()` on the base model first and expect a dense model."
            )
        return super().merge(safe_merge=safe_merge, adapter_names=adapter_names)


def refuse_over_blocks(config, base: nn.Module, name: str, parameter_name: str | None) -> None:
    """Raise ValueError for an adapter that reads or changes the base weight."""
    what = f"`{name}` ({type(base).__name__}) is block-sparse"
    method = str(getattr(config.peft_type, "value", config.peft_type))
    initialization = getattr(config, "init_lora_weights", True)
    plain = initialization in (True, False) or str(initialization).lower() in ("gaussian", "orthogonal")
    if method != "LORA" or parameter_name is not None or getattr(config, "use_dora", False) or not plain:
        raise ValueError(
            f"`peft_type`={method}: {what}, and only LoRA without DoRA, with plain initializations, leaves its weight "
            "alone. Use that, or call `model.dequantize()` before `get_peft_model`."
        )


@cache
def adapter_class(cls: type) -> type:
    """The class for an adapter layer of PEFT class `cls` over a block-sparse layer."""
    body = {"__reduce_ex__": _reduce, "__module__": __name__, "_made_from": cls}
    return type(f"BlockSparse{cls.__name__}", (BlockSparseAdapter, cls), body)


def adapt(layer: nn.Module, name: str) -> None:
    """Give a PEFT layer over a block-sparse layer our class, in place."""
    if not isinstance(layer, BlockSparseAdapter):
        layer.__class__ = adapter_class(type(layer))
        layer.sparse_name = name


def _reduce(self, protocol):
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    return _empty, (type(self)._made_from,), state


def _empty(cls: type) -> nn.Module:
    made = adapter_class(cls)
    return made.__new__(made)
