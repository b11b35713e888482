"""How many operations a layer of ours does for each byte it moves, and what that allows it on a given machine.

    operations   2 M N K for y [M, N] = x [M, K] W^T, of live weights only where blocks are dead
    bytes        weights as they are stored, with scales and indices, + x and y, each once
    intensity    operations / bytes
    bound        min(compute ceiling of the dtype that is multiplied, intensity * bandwidth)   operations a second
    attained     measured operations a second / bound

(Williams et al. 2009, *Roofline*; Farrell et al. 2021 extend it by file and network ceilings.) The dtype that counts
is the one that is multiplied: int8 where activations are int8, else that of x.
"""

from dataclasses import dataclass

import torch

from benchmarks.blocks import random_blocks
from benchmarks.linear import SCHEMES, packed_ring
from hf_lowbit.functional.blocks import block_linear
from hf_lowbit.functional.linear import linear


# name -> (sparsity, block)
SPARSE = {"block-sparse 90% b64 bf16": (0.9, 64), "block-sparse 70% b64 bf16": (0.7, 64)}
DENSE = {"dense fp32": torch.float32, "dense bf16": torch.bfloat16}
NAMES = (*DENSE, *SCHEMES, *SPARSE)


@dataclass(frozen=True)
class Work:
    """What a product of M rows does."""

    operations: float
    weight_bytes: float
    data_bytes: float  # x and y
    multiplied: str  # "fp32", "bf16" or "int8": which compute ceiling holds

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / (self.weight_bytes + self.data_bytes)

    def bound(self, compute: dict[str, float], bandwidth: float) -> tuple[float, str]:
        """(operations a second, "compute" or "memory"). compute: ceilings by dtype; bandwidth: bytes a second."""
        by_memory = self.intensity * bandwidth
        return min((compute[self.multiplied], "compute"), (by_memory, "memory"))


def layer(name: str, shape: tuple[int, int], count: int):
    """(function(x, i), weight bytes, live share, dtype of x, what is multiplied) of `count` weights in a ring."""
    if name in DENSE:
        dtype = DENSE[name]
        ring = [torch.randn(shape).to(dtype) for _ in range(count)]
        word = "fp32" if dtype == torch.float32 else "bf16"
        return lambda x, i: torch.nn.functional.linear(x, ring[i % count]), _bytes(ring[0]), 1.0, dtype, word
    if name in SPARSE:
        sparsity, block = SPARSE[name]
        sparse = [random_blocks(shape, block, sparsity, torch.bfloat16) for _ in range(count)]
        live = sparse[0][0].numel() / (shape[0] * shape[1])

        def product(x, i):
            return block_linear(x, *sparse[i % count], None, shape[1])

        return product, _bytes(*sparse[0]), live, torch.bfloat16, "bf16"
    bits, group, int8 = SCHEMES[name]
    packed, size = packed_ring(bits, group, shape, count), group if isinstance(group, int) else None

    def product(x, i):
        return linear(x, *packed[i % count], None, None, bits, shape[1], size, int8)

    return product, _bytes(*packed[0]), 1.0, torch.bfloat16, "int8" if int8 else "bf16"


def work(shape: tuple[int, int], rows: int, weight_bytes: float, live: float, dtype: torch.dtype, word: str) -> Work:
    """What `rows` rows of x ask of a layer [N, K]."""
    data = rows * (shape[0] + shape[1]) * dtype.itemsize
    return Work(2.0 * rows * shape[0] * shape[1] * live, weight_bytes, data, word)


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
