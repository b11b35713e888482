"""Second copies of weights in the order some product of torch wants: bounded, out of sight, gone with the weight.

What they cost, for a weight of N x K:

    int4 order      float activations, few rows                     N K / 2 bytes (N K at 8 bits), and 4 a group
    dense           float activations, more rows; int8 with groups  2 N K bytes (4 N K in float32)
    int8 order      int8 activations without groups                 N K bytes, and 4 a row

A model of 4 bits that generates text uses the first for its tokens and the second for its prompts: 4.5 + 16 bits a
weight besides the stored 4.25. That is the price of speed without a compiler: torch unpacks too slowly to do it at
every call, and where bfloat16 has matrix units that costs more than the product itself. Whoever has no memory to spare
sets HF_LOWBIT_REPACK_BYTES, the most that all copies together may take; without it they stay below a quarter of the
machine's memory, and 0 turns them off: then weights are unpacked at every call. A copy that finds no room is not made:
replacing older ones would make a model that does not fit pack every layer again for every token.

A copy belongs to the storage of the weight (not to a tensor object: `view` makes new ones), by weak reference: it is
never copied, pickled or saved with the model. It is valid as long as address and version counter of weight, scale and
zero point are those it was made from. Writing through `.data` leaves the counter alone and is not seen: write to
parameters under `torch.no_grad()`. Tensors made in inference mode have no counter and get no copies. A copy is made at
the first call that wants it, so that all calls with as many rows give the same numbers: each way rounds in its own
place.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blocks import Layer


REPACK_VARIABLE = "HF_LOWBIT_REPACK_BYTES"


class _Copy(NamedTuple):
    """`value` is None when there is no copy to be had. The storages are those of weight, scale and zero point."""

    state: tuple
    weight: weakref.ref
    scale: weakref.ref
    zero_point: weakref.ref | None
    value: Any
    size: int


_copies: dict[tuple, _Copy] = {}
_lock = threading.Lock()


def copy_of(layer: Layer, make: Callable[[Layer], Any], size: int) -> Any:
    """`make(layer)`, kept; None without room for `size` bytes, the most it may take, or when `make` gives None."""
    weight, scale, zero_point, problem = layer
    try:
        state = weight._version, scale.data_ptr(), scale._version
        if zero_point is not None:
            state = (*state, zero_point.data_ptr(), zero_point._version)
    except RuntimeError:
        # a tensor of inference mode has no version
        return None
    key = make, weight.data_ptr(), problem.bits, problem.group_size, problem.out_features, problem.in_features
    copy = _copies.get(key)
    # addresses are used again after a tensor has died: the storages themselves must be the same
    if (
        copy is not None
        and copy.state == state
        and copy.weight() is weight.untyped_storage()
        and copy.scale() is scale.untyped_storage()
        and (zero_point is None or copy.zero_point() is zero_point.untyped_storage())
    ):
        return copy.value
    with _lock:
        # what was made from other numbers goes before there is room for the new
        _copies.pop(key, None)
        value, taken = _make(layer, make, size)
        of_weight = weakref.ref(weight.untyped_storage(), lambda dead: _forget(key, dead))
        of_zero_point = None if zero_point is None else weakref.ref(zero_point.untyped_storage())
        _copies[key] = _Copy(state, of_weight, weakref.ref(scale.untyped_storage()), of_zero_point, value, taken)
        return value


def held_bytes() -> int:
    """Bytes of all copies that are alive."""
    return sum(copy.size for copy in list(_copies.values()))


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


def _forget(key: tuple, dead: weakref.ref) -> None:
    # the address may already belong to another weight
    copy = _copies.get(key)
    if copy is not None and copy.weight is dead:
        _copies.pop(key, None)


def _make(layer: Layer, make: Callable[[Layer], Any], size: int) -> tuple[Any, int]:
    value = make(layer) if size <= repack_limit() - held_bytes() else None
    parts = value if isinstance(value, tuple) else (value,)
    return value, sum(_bytes(part) for part in parts if isinstance(part, Tensor))


def _bytes(tensor: Tensor) -> int:
    return torch.ops.mkldnn._nbytes(tensor) if tensor.is_mkldnn else tensor.nbytes
