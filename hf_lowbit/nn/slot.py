"""`CodesParameter`: what a trainable low-bit weight is to PyTorch: a float parameter in every respect but its memory.

Gradients need a floating-point leaf of the weight's dense shape, for autograd, `clip_grad_norm_`, `zero_grad`,
accumulation, hooks and DDP to find. Packed codes are neither floating-point nor of that shape. So the codes and scale
sit inside a tensor subclass without storage of its own, which reports the dense shape and a float dtype:

- reading it with any torch function dequantizes it for that one call; a view of it is a copy that can't be written to
  (`readonly.py`),
- its gradient is an ordinary dense tensor,
- writing to it raises: codes change by direct updates only (`hf_lowbit/training`). An optimizer that added its step to
  the dequantized numbers would round it away, or round every weight anew. The one write that is accepted is a copy of
  numbers that lie on its grid exactly (DDP sends rank 0's weights that way).

Modules hold it as their `weight` while they are trainable; their state dict holds the plain packed tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..functional.grid import dequantize, grid_of
from ..functional.packing import pack, unpack
from ..functional.rounding import to_codes
from .packed import PackedWeight
from .readonly import read_only_views, refuse, refuse_writes


aten = torch.ops.aten
# these make a tensor like another without reading it
LIKE = (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.rand_like.default, aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default,
        aten.new_empty_strided.default, aten.new_ones.default, aten.new_full.default)  # fmt: skip
SHARED = (aten.detach.default, aten.alias.default)


class CodesParameter(Tensor):
    """Shape `packed.shape`, dtype as given, no storage. `stored` int8 bytes, `scale` and `zero_point` are shared with
    the module's own tensors: what changes there changes here."""

    stored: Tensor
    scale: Tensor
    zero_point: Tensor | None
    packed: PackedWeight

    @staticmethod
    def __new__(cls, stored, scale, zero_point, packed, dtype, requires_grad=False):
        return Tensor._make_wrapper_subclass(
            cls, packed.shape, dtype=dtype, device=stored.device, requires_grad=requires_grad
        )

    def __init__(self, stored, scale, zero_point, packed, dtype, requires_grad=False):
        self.stored, self.scale, self.zero_point, self.packed = stored, scale, zero_point, packed

    def dense(self) -> Tensor:
        """The numbers of the stored codes, as a plain tensor."""
        packed = self.packed
        codes = unpack(self.stored.view(packed.out_features, -1), grid_of(packed.scheme.bits), packed.in_features)
        dense = dequantize(codes, self.scale, self.zero_point, packed.scheme.block, self.dtype)
        # contiguous, as the strides that this tensor reports say
        return dense.t().contiguous() if packed.transposed else dense

    def like(self, stored: Tensor, dtype: torch.dtype | None = None) -> CodesParameter:
        """The same weight over other bytes or in another dtype."""
        scale = self.scale.to(stored.device)
        zero_point = None if self.zero_point is None else self.zero_point.to(stored.device)
        return CodesParameter(stored, scale, zero_point, self.packed, dtype or self.dtype)

    def __repr__(self, *, tensor_contents=None):
        return f"CodesParameter(shape={tuple(self.shape)}, bits={self.packed.scheme.bits}, dtype={self.dtype})"

    def __setitem__(self, index, value):
        # would go through a view, which is a copy here: the write would be lost
        refuse("__setitem__")

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copy = self.like(self.stored.clone())
            copy.scale = copy.scale.clone()
            copy.__dict__.update({k: v for k, v in self.__dict__.items() if k not in copy.__dict__})
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
            if self.grad is not None:
                memo[id(self)].grad = self.grad.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        state = (self.stored, self.scale, self.zero_point, self.packed, self.dtype)
        return _rebuild, (*state, self.requires_grad, isinstance(self, nn.Parameter))

    def __tensor_flatten__(self):
        names = ["stored", "scale"] + ([] if self.zero_point is None else ["zero_point"])
        return names, (self.packed, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        packed, dtype = context
        return CodesParameter(inner["stored"], inner["scale"], inner.get("zero_point"), packed, dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, CodesParameter):
            if func in SHARED:
                return first.like(first.stored)
            if func is aten.clone.default:
                copy = first.like(first.stored.clone())
                copy.scale = copy.scale.clone()
                return copy
            if func is aten._to_copy.default:
                stored = first.stored.to(kwargs.get("device") or first.device, copy=True)
                dtype = kwargs.get("dtype") or first.dtype
                return first.like(stored, dtype) if dtype.is_floating_point else first.dense().to(**kwargs)
            if func is aten.copy_.default:
                return _copy_on_grid(first, args[1])
            if func in LIKE:
                # a tensor of the right shape and dtype whose numbers nobody reads
                plain = torch.empty((), dtype=first.dtype, device=first.device).expand(first.shape)
                return func(plain, *args[1:], **kwargs)
        if func._schema.is_mutable:
            refuse_writes(func, args, kwargs, CodesParameter)
        plain = tree_map_only(CodesParameter, CodesParameter.dense, (args, kwargs))
        return read_only_views(func, func(*plain[0], **plain[1]))


def make_parameter(stored, scale, zero_point, packed, dtype, requires_grad=True) -> CodesParameter:
    """A `CodesParameter` that modules and optimizers take for an `nn.Parameter`."""
    return nn.Parameter(CodesParameter(stored, scale, zero_point, packed, dtype), requires_grad=requires_grad)


def _rebuild(stored, scale, zero_point, packed, dtype, requires_grad, parameter):
    if parameter:
        return make_parameter(stored, scale, zero_point, packed, dtype, requires_grad)
    return CodesParameter(stored, scale, zero_point, packed, dtype).requires_grad_(requires_grad)


def _copy_on_grid(weight: CodesParameter, source: Tensor) -> CodesParameter:
    """Copy numbers that lie on the grid; anything else would be rounded without a word."""
    if isinstance(source, CodesParameter) and source.packed == weight.packed:
        weight.stored.copy_(source.stored)
        weight.scale.copy_(source.scale)
        return weight
    dense = source.dense() if isinstance(source, CodesParameter) else source
    dense = dense.to(device=weight.device).expand(weight.shape)
    packed, grid = weight.packed, grid_of(weight.packed.scheme.bits)
    oriented = dense.t() if packed.transposed else dense
    codes = to_codes(oriented, grid, weight.scale, weight.zero_point, packed.scheme.block)
    back = dequantize(codes, weight.scale, weight.zero_point, packed.scheme.block, weight.dtype)
    if not torch.equal(back, oriented.to(weight.dtype)):
        raise RuntimeError(
            "float numbers that do not lie on its grid were copied into a trainable low-bit weight: replicas that "
            "started from different weights, or an initialization that runs after quantization. Initialize first, "
            "quantize then, and give every process the same model."
        )
    weight.stored.copy_(pack(codes, grid).view(weight.stored.shape))
    return weight
