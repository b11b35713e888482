"""Which low-bit class stands in for a dense class, and back.

A module is converted in place, by changing its class: hooks, attributes, buffers and references to it stay. Plain
classes map to fixed ones. A subclass that calls `super().forward` (BART's scaled embedding) gets a class made on the
fly, `LowBit<Name>(<Name>, LowBitEmbedding)`, so that its `super()` reaches ours; such classes pickle by naming their
dense class. Gemma's would cast its scale to the dtype of the codes, and Falcon's linear layer spells the product out:
their forwards are replaced.
"""

from __future__ import annotations

from functools import cache

from torch import nn
from transformers.pytorch_utils import Conv1D

from .block_sparse import BlockSparseConv1D, BlockSparseLinear
from .embedding import LowBitEmbedding, LowBitScaledEmbedding
from .experts import LowBitExperts, stack_property
from .gated import GatedBlocks
from .linear import LowBitConv1D, LowBitLinear
from .masked import MaskedConv1D, MaskedLinear
from .masked_codes import MaskedCodesConv1D, MaskedCodesLinear
from .reads import is_plain_product, only_scales
from .sparse_experts import SparseExperts, sparse_property
from .trainable import TrainableConv1D, TrainableLinear


KINDS = {"linear": (nn.Linear, LowBitLinear), "conv1d": (Conv1D, LowBitConv1D),
         "embedding": (nn.Embedding, LowBitEmbedding), "trainable-linear": (nn.Linear, TrainableLinear),
         "trainable-conv1d": (Conv1D, TrainableConv1D), "masked-linear": (nn.Linear, MaskedLinear),
         "masked-conv1d": (Conv1D, MaskedConv1D), "masked-codes-linear": (nn.Linear, MaskedCodesLinear),
         "masked-codes-conv1d": (Conv1D, MaskedCodesConv1D), "block-linear": (nn.Linear, BlockSparseLinear),
         "block-conv1d": (Conv1D, BlockSparseConv1D)}  # fmt: skip
# modules of fused experts: what is put in front of them, and what stands under the parameters' names
EXPERTS = {"experts": (LowBitExperts, stack_property), "sparse-experts": (SparseExperts, sparse_property)}


@cache
def lowbit_class(dense_class: type, kind: str, names: tuple[str, ...]) -> type:
    """The low-bit class for `dense_class`. `names` are the packed parameters (more than one for experts)."""
    bases: tuple[type, ...]
    if kind == "gated":
        bases, body = (GatedBlocks, dense_class), {}
    elif kind in EXPERTS:
        mixin, make_property = EXPERTS[kind]
        bases = (mixin, dense_class)
        body = {name: make_property(name) for name in names}
    else:
        plain, lowbit = KINDS[kind]
        if dense_class is plain:
            return lowbit
        if kind == "embedding" and only_scales(dense_class):
            bases = (LowBitScaledEmbedding, dense_class)
        elif kind.endswith("linear") and is_plain_product(dense_class):
            bases = (lowbit, dense_class)
        else:
            bases = (dense_class, lowbit)
        body = {}
    body |= {"__reduce_ex__": _reduce, "__module__": __name__, "_made_from": (dense_class, kind, names)}
    return type(f"LowBit{dense_class.__name__}", bases, body)


def kind_of(module: nn.Module) -> str:
    """The kind a low-bit module was converted as: a key of `KINDS` or `EXPERTS`, or "gated"."""
    made_from = getattr(type(module), "_made_from", None)
    if made_from is not None:
        return made_from[1]
    return next(kind for kind, (_, lowbit) in KINDS.items() if type(module) is lowbit)


def dense_class(module: nn.Module) -> type:
    """The class a low-bit module had before it was converted."""
    made_from = getattr(type(module), "_made_from", None)
    if made_from is not None:
        return made_from[0]
    return next(plain for plain, lowbit in KINDS.values() if type(module) is lowbit)


def _reduce(self, protocol):
    # objects have `__getstate__` from Python 3.11 on
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    return _empty, type(self)._made_from, state


def _empty(dense: type, kind: str, names: tuple[str, ...]) -> nn.Module:
    cls = lowbit_class(dense, kind, names)
    return cls.__new__(cls)
