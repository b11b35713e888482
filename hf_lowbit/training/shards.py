"""Rows of a weight shared out over the processes that train it: which rows are whose, and how they travel.

With P processes, weight W [R, K] is cut into P runs of ceil(R / P) rows (the last ones shorter, or empty). Process p
holds gradient and optimizer state of its run alone:

    g_p = (1 / P) sum over processes of their gradient's rows p      reduce-scatter
    q_p = update(q_p, g_p, state_p)                                  noise of the whole's rows: functional/noise.py
    q   = all q_p, one after another                                 all-gather of packed codes

so every process has the same codes by construction, and the codes are those that one process would reach with the
averaged gradient (stage 2 of Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models"). What travels back is packed: a quarter of a byte to a byte a weight, where float weights take 2 or 4.

`RowGradient` is what lies in `parameter.grad` meanwhile: it reports the weight's shape and holds the own rows. Norms
are those of the whole gradient, so clipping by global norm works as it does for whole gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


aten = torch.ops.aten
SCALING = (aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.zero_.default)


class Shards(NamedTuple):
    """This process's place among those that share the rows."""

    rank: int
    world: int

    def chunk(self, rows: int) -> int:
        """Rows of a process, at most."""
        return -(-rows // self.world)

    def own(self, rows: int, rank: int | None = None) -> slice:
        """The run of rows of a process (default: this one); empty where there are too few."""
        rank, chunk = self.rank if rank is None else rank, self.chunk(rows)
        return slice(min(rank * chunk, rows), min((rank + 1) * chunk, rows))

    def scatter_mean(self, matrix: Tensor) -> Tensor:
        """The own rows of the mean over processes of `matrix` [R, K]; overwrites it where it is contiguous."""
        rows, chunk = matrix.shape[0], self.chunk(matrix.shape[0])
        # divided first, as DDP does: a sum of half-precision gradients might overflow
        whole = F.pad(matrix.contiguous().div_(self.world), (0, 0, 0, chunk * self.world - rows))
        part = whole.new_empty(chunk, matrix.shape[1])
        dist.reduce_scatter_tensor(part, whole)
        own = self.own(rows)
        return part[: own.stop - own.start]

    def gather_(self, matrix: Tensor) -> None:
        """Put the own rows of every process into `matrix` [R, K] of each."""
        rows, chunk = matrix.shape[0], self.chunk(matrix.shape[0])
        part = _padded(matrix[self.own(rows)], chunk)
        whole = part.new_empty(chunk * self.world, part.shape[1])
        dist.all_gather_into_tensor(whole, part)
        matrix.copy_(whole[:rows].view(matrix.dtype))

    def collect(self, part: Tensor, rows: int) -> Tensor | None:
        """The whole of what each process holds a part of, in the CPU's memory of process 0; None elsewhere."""
        chunk = self.chunk(rows)
        sent = _padded(part, chunk)
        parts = [torch.empty_like(sent) for _ in range(self.world)] if self.rank == 0 else None
        dist.gather(sent, parts)
        return None if parts is None else torch.cat(parts)[:rows].view(part.dtype).cpu()

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over processes; overwrites `numbers`."""
        dist.all_reduce(numbers)
        return numbers

    def all(self, true: bool, device: torch.device) -> bool:
        """Does it hold in every process?"""
        flag = torch.tensor([0 if true else 1], device=device)
        return int(self.sum(flag)) == 0


def here() -> Shards | None:
    """The place among the processes of torch.distributed; None where this is the only one."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return Shards(dist.get_rank(), dist.get_world_size())


class RowGradient(Tensor):
    """A gradient of the shape and dtype of its weight, of which this process holds the rows `local` [r, K].

    It can be scaled, zeroed and measured, in all processes at once; anything else raises RuntimeError.
    """

    local: Tensor
    shards: Shards

    @staticmethod
    def __new__(cls, local, shards, shape):
        return Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)

    def __init__(self, local, shards, shape):
        self.local, self.shards = local, shards

    def __repr__(self, *, tensor_contents=None):
        return f"RowGradient(shape={tuple(self.shape)}, {self.local.shape[0]} rows of process {self.shards.rank})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        grad, rest = (args[0], args[1:]) if isinstance(args[0], RowGradient) else (None, ())
        if grad is not None and func in SCALING:
            func(grad.local, *rest, **(kwargs or {}))
            return grad
        if grad is not None and func is aten.detach.default:
            return RowGradient(grad.local, grad.shards, grad.shape)
        if grad is not None and func is aten.linalg_vector_norm.default:
            return _norm(grad, *rest[:1])
        raise RuntimeError(
            f"{func} of the gradient of a weight whose rows are shared out (`shard_states=True`): this process holds "
            "a part of it, `grad.local`. Gradients can be scaled, zeroed and clipped by norm."
        )


def local_part(grad: Tensor) -> Tensor:
    """What this process holds of a gradient."""
    return grad.local if isinstance(grad, RowGradient) else grad


def _norm(grad: RowGradient, order: float = 2.0) -> Tensor:
    if not order > 0:
        raise RuntimeError(f"a norm of order {order} of a gradient whose rows are shared out; use one above 0.")
    # in float32: the parts' norms are no result yet
    held = grad.local.float() if grad.local.numel() else torch.zeros(1, device=grad.device)
    part = torch.linalg.vector_norm(held, order)
    if order == float("inf"):
        dist.all_reduce(part, dist.ReduceOp.MAX)
        return part.to(grad.dtype)
    return grad.shards.sum(part.double() ** order).pow(1 / order).to(grad.dtype)


def _padded(part: Tensor, rows: int) -> Tensor:
    """The bytes of `part`, with zeros up to `rows` rows: gloo and nccl send bytes alike."""
    return F.pad(part.contiguous().view(torch.uint8), (0, 0, 0, rows - part.shape[0]))
