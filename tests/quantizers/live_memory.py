"""Counting the bytes that tensors hold while a block runs: allocated by torch operations, and not yet freed."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """`peak` and `largest`: most bytes alive at once, and in one tensor, of what operations in the block allocated.

    Memory that was there before, and files mapped into memory, are not counted; a view counts once, with its storage.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for storage in _storages((args, kwargs)):
            self._remember(storage, 0)
        output = func(*args, **(kwargs or {}))
        for storage in _storages(output):
            self._remember(storage, storage.nbytes())
        return output

    def _remember(self, storage, size):
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size)

    def _forget(self, key, size):
        del self._known[key]
        self.live -= size


def _storages(tree):
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta"]
