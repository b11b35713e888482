"""Second copies of weights in the order some product of torch wants: bounded, out of sight, gone with the weight.

What they cost: the int4 order N K / 2 bytes (N K at 8 bits) and 4 bytes a group; int8 codes of int8 activations below
8 bits N K bytes. A layer of ternary weights that is used with int8 activations so takes 10 bits a weight instead of 2.
All copies together stay below a quarter of the machine's memory, or below HF_LOWBIT_REPACK_BYTES; 0 turns them off,
and then weights are unpacked at every call. A copy that finds no room is not made: replacing older ones would make a
model that does not fit pack every layer again for every token.

A copy belongs to the storage of the weight (not to a tensor object: `view` makes new ones), by weak reference: it is
never copied, pickled or saved with the model. It is valid as long as address and version counter of weight, scale and
zero point are those it was made from. Writing through `.data` leaves the counter alone and is not seen: write to
parameters under `torch.no_grad()`. Tensors made in inference mode have no counter and get no copies. A copy is made at
the first call, so that all calls give the same numbers: the int4 product rounds once more than the blocked one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .blocks import Layer


REPACK_VARIABLE = "HF_LOWBIT_REPACK_BYTES"


class _Copy(NamedTuple):
    """`value` is None when there is no copy to be had."""

    state: tuple
    storages: tuple
    value: Any
    size: int


_copies: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def copy_of(layer: Layer, make: Callable[[Layer], Any]) -> Any:
    """`make(layer)`, kept; None without room, or when `make` gives None."""
    problem = layer.problem
    tensors = layer[:3] if layer.zero_point is not None else layer[:2]
    if any(t.is_inference() for t in tensors):
        return None
    state = tuple([(t.data_ptr(), t._version) for t in tensors])
    storages = [t.untyped_storage() for t in tensors]
    key = (make, state[0][0], problem.bits, problem.group_size, problem.out_features, problem.in_features)
    with _lock:
        # addresses are used again after a tensor has died: the storages themselves must be the same
        of_weight = _copies.setdefault(storages[0], {})
        copy = of_weight.get(key)
        known = copy is not None and copy.state == state
        if known and all(ref() is storage for ref, storage in zip(copy.storages, storages, strict=True)):
            return copy.value
        # what was made from other numbers goes before there is room for the new
        of_weight.pop(key, None)
        value, size = _make(layer, make)
        of_weight[key] = _Copy(state, tuple(weakref.ref(storage) for storage in storages), value, size)
        return value


def held_bytes() -> int:
    """Bytes of all copies that are alive."""
    return sum(copy.size for of_weight in list(_copies.values()) for copy in of_weight.values())


def repack_limit() -> int:
    """Bytes that copies may take together: HF_LOWBIT_REPACK_BYTES, else a quarter of the machine's memory."""
    limit = os.environ.get(REPACK_VARIABLE)
    if limit is None:
        if not hasattr(os, "sysconf"):
            return 4 << 30
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    if not limit.isdigit():
        raise ValueError(
            f"{REPACK_VARIABLE}={limit!r} is no number of bytes; use for example 1000000000, or 0 for none."
        )
    return int(limit)


def _make(layer: Layer, make: Callable[[Layer], Any]) -> tuple[Any, int]:
    # eight bits a weight is the most a copy takes, so this refuses before it allocates
    room = repack_limit() - held_bytes()
    value = make(layer) if layer.problem.out_features * layer.problem.in_features <= room else None
    size = sum(t.nbytes for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, Tensor))
    return value, size
