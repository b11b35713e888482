"""Keeping the replicas of a data-parallel run identical, and proving it.

Gradients are averaged by DDP, and the rounding noise is a function of seed, step, name and element, so replicas that
start equal stay equal. Nothing in DDP would notice if they did not: it never compares weights. So they are made equal
once, and compared by a hash of their codes and scales from time to time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ..nn.slot import CodesParameter


def world_size() -> int:
    """Processes that train together; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def digest(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of all codes and scales, by name."""
    total = hashlib.blake2b(digest_size=16)
    for name, parameter in parameters:
        total.update(name.encode())
        for tensor in _tensors(parameter):
            total.update(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return total.hexdigest()


def synchronize(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Give every process the codes and scales of the first."""
    if world_size() == 1:
        return
    for _, parameter in parameters:
        for tensor in _tensors(parameter):
            # gloo and nccl send bytes alike
            dist.broadcast(tensor.view(torch.uint8), src=0)


def check_replicas(parameters: Iterable[tuple[str, Tensor]], step: int) -> None:
    """Raise RuntimeError when the processes hold different codes or scales. Every process must call it."""
    if world_size() == 1:
        return
    digests = _digests(parameters)
    if len(set(digests)) > 1:
        groups = {d: [rank for rank, other in enumerate(digests) if other == d] for d in digests}
        raise RuntimeError(
            f"the replicas hold different low-bit weights at step {step}; agreeing ranks: {sorted(groups.values())}. "
            "Give every process the same `seed` and model, let DDP average the gradients of every step, and let "
            "nothing else write to the weights."
        )


def same_everywhere(tensors: Iterable[tuple[str, Tensor]]) -> bool:
    """Do all processes hold the same tensors, bit for bit? Every process must call it."""
    return len(set(_digests(tensors))) == 1


def _digests(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    found: list = [None] * world_size()
    dist.all_gather_object(found, digest(tensors))
    return found


def _tensors(parameter: Tensor) -> list[Tensor]:
    if isinstance(parameter, CodesParameter):
        return [parameter.stored, parameter.scale]
    return [parameter.detach()]
