"""Packed layers for the product tests, with their dense numbers from the formula and not from `unpack`."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_lowbit.functional.grid import grid_of, group_count
from hf_lowbit.functional.linear import linear
from hf_lowbit.functional.packing import pack


class Layer(NamedTuple):
    """A weight as it is stored, and its codes q [N, K]."""

    bits: str | int
    group_size: int | str | None
    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None
    codes: Tensor

    @property
    def block(self) -> int | None:
        return self.group_size if isinstance(self.group_size, int) else None

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    def steps(self) -> np.ndarray:
        """q - z, int32 [N, K]."""
        return self.codes.numpy().astype(np.int32) - self.spread(self.zero_point, np.int32)

    def spread(self, per_group: Tensor | None, dtype) -> np.ndarray:
        """One value a weight [N, K] (or broadcastable) of one value a group; 0 for None."""
        if per_group is None:
            return np.zeros((1, 1), dtype)
        values = per_group.float().numpy().astype(dtype)
        return values[:, np.arange(self.in_features) // self.block] if self.block else values

    def dense(self, dtype: torch.dtype) -> Tensor:
        """s (q - z) as float64 numbers, each product formed in float32 and rounded to `dtype`."""
        product = (self.spread(self.scale, np.float32) * self.steps().astype(np.float32)).astype(np.float32)
        return torch.from_numpy(product).to(dtype).to(torch.float64)

    def __call__(self, x: Tensor, bias: Tensor | None = None, int8: bool = False) -> Tensor:
        weight = self.weight.unsqueeze(0)
        return linear(x, weight, self.scale, self.zero_point, bias, self.bits, self.in_features, self.block, int8)


def make_layer(bits=4, group_size=None, symmetric=True, out_features=5, in_features=10, seed=0) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    grid = grid_of(bits)

    def integers(shape):
        return torch.randint(grid.qmin, grid.qmax + 1, shape, dtype=torch.int8, generator=generator)

    groups = group_count(in_features, group_size) if isinstance(group_size, int) else 1
    shape = (1, 1) if group_size == "tensor" else (out_features, groups)
    scale = 0.01 + 0.05 * torch.rand(shape, generator=generator)
    scale = scale.to(torch.bfloat16) if isinstance(group_size, int) else scale
    codes = integers((out_features, in_features))
    return Layer(bits, group_size, pack(codes, grid), scale, None if symmetric else integers(shape), codes)


def random(*shape, dtype=torch.float32, seed=1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
