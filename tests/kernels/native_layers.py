"""Random packed layers as `functional.linear.linear` takes them."""

import torch

from hf_lowbit.functional.grid import grid_of, group_count
from hf_lowbit.functional.linear import problem_of
from hf_lowbit.functional.packing import pack


def make(bits, group_size, asymmetric, shape, seed=0):
    """Arguments of `linear` after x: weight, scale, zero_point, bias=None, bits, in_features, group_size."""
    rows, width = shape
    generator = torch.Generator().manual_seed(seed)
    grid = grid_of(bits)
    size = group_size if isinstance(group_size, int) else None
    scales = (1, 1) if group_size == "tensor" else (rows, group_count(width, size))
    codes = torch.randint(grid.qmin, grid.qmax + 1, shape, dtype=torch.int8, generator=generator)
    scale = torch.rand(scales, generator=generator) * 0.1 + 0.01
    zero_point = torch.randint(grid.qmin // 2, grid.qmax // 2 + 1, scales, dtype=torch.int8, generator=generator)
    return (
        pack(codes, grid).unsqueeze(0), scale.to(torch.bfloat16) if size else scale,
        zero_point if asymmetric else None, None, bits, width, size,
    )  # fmt: skip


def problem_for(x, layer, int8_activations=False):
    weight, scale, zero_point, _, bits, width, size = layer
    return problem_of(x, weight[0], scale, zero_point, bits, width, size or 0, int8_activations)
