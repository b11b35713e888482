"""`ReadOnly`: numbers that stand for a part of a trainable weight, to be read and not written.

A view of packed codes can't share their memory: it is a copy of the dequantized numbers. A write into a plain copy
would be lost without a word (`weight[0].zero_()`), so the copy is wrapped in a tensor that raises when it is written
to. Reading it, by any torch function, gives plain tensors; a view of it is read-only again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class ReadOnly(Tensor):
    """The numbers `dense`; what writes to it raises RuntimeError."""

    dense: Tensor

    @staticmethod
    def __new__(cls, dense):
        return Tensor._make_wrapper_subclass(
            cls, dense.shape, strides=dense.stride(), storage_offset=dense.storage_offset(), dtype=dense.dtype,
            device=dense.device,
        )  # fmt: skip

    def __init__(self, dense):
        self.dense = dense

    def __repr__(self, *, tensor_contents=None):
        return f"ReadOnly({self.dense!r})"

    def tolist(self):
        return self.dense.tolist()

    def numpy(self, *, force=False):
        return self.dense.clone().numpy(force=force)

    def __array__(self, dtype=None):
        return self.dense.clone().numpy() if dtype is None else self.dense.numpy().astype(dtype)

    def __reduce_ex__(self, protocol):
        return self.dense.__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return self.dense.clone()

    def __tensor_flatten__(self):
        return ["dense"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return ReadOnly(inner["dense"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            refuse_writes(func, args, kwargs, ReadOnly)
        plain = tree_map_only(ReadOnly, lambda x: x.dense, (args, kwargs))
        return read_only_views(func, func(*plain[0], **plain[1]))


def read_only_views(func, result):
    """`result` of `func`, read-only where it is a view of an argument."""
    views = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
    return tree_map_only(Tensor, ReadOnly, result) if views else result


def refuse_writes(func, args, kwargs, ours: type) -> None:
    """Raise RuntimeError when an argument that `func` writes to is an instance of `ours`."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(v, ours) for v in values):
            refuse(func)


def refuse(name) -> None:
    raise RuntimeError(
        f"`{name}` would write floats into a trainable low-bit weight. Its codes are trained by direct "
        "updates only: add `hf_lowbit.DQTCallback()` to the Trainer's callbacks, or use "
        "`hf_lowbit.DQTOptimizer` in a loop of your own. To leave low-bit weights as they are, set "
        "`requires_grad_(False)` on them."
    )
