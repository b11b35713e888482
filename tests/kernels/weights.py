"""Random packed weights of every scheme, and what a product with them should give."""

import math

import torch
from hypothesis import strategies as st

from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.functional.grid import BITS, TERNARY, dequantize, grid_of, group_count
from hf_lowbit.functional.linear import linear, problem_of, quantize_activations
from hf_lowbit.functional.packing import pack, unpack


# multiples of the vector steps (16, 32, 64 ...) and their neighbours are where tails begin and end
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 255, 256, 257, 320, 511, 576, 600]))
ROWS = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33])
GROUPS = st.sampled_from([None, "tensor", 32, 64, 96, 128, 256])


@st.composite
def schemes(draw):
    """(bits, group size, zero points?)"""
    bits = draw(st.sampled_from(BITS))
    return bits, draw(GROUPS), bits != TERNARY and draw(st.booleans())


def make_weight(bits, group, asymmetric, out_features, in_features, seed=0, unit_scale=False):
    """(packed weight, scale, zero point or None) with codes over the whole grid."""
    generator = torch.Generator().manual_seed(seed)
    grid = grid_of(bits)

    def codes(shape):
        return torch.randint(grid.qmin, grid.qmax + 1, shape, generator=generator, dtype=torch.int8)

    shape = (1, 1) if group == "tensor" else (out_features, group_count(in_features, group))
    dtype = torch.bfloat16 if isinstance(group, int) else torch.float32
    scale = torch.ones(shape) if unit_scale else torch.rand(shape, generator=generator) * 0.02 + 0.005
    return pack(codes((out_features, in_features)), grid), scale.to(dtype), codes(shape) if asymmetric else None


def problem_for(x, weight, bits, group, in_features, int8):
    return problem_of(x, *weight, bits, in_features, group if isinstance(group, int) else 0, int8)


def run(kernel, x, weight, bias, bits, group, int8):
    """The product by one kernel, whatever the library would choose."""
    with torch.no_grad(), use_kernel(kernel):
        return linear(x, *weight, bias, bits, x.shape[-1], group if isinstance(group, int) else None, int8)


def dense(weight, bits, group, in_features):
    """The weight as float32, never rounded further."""
    packed, scale, zero_point = weight
    codes = unpack(packed, grid_of(bits), in_features)
    return dequantize(codes, scale, zero_point, group if isinstance(group, int) else None)


def expected_and_size(x, weight, bits, group, bias, int8):
    """y in float64, and the size of its terms: the root of their summed squares, before offsets cancel."""
    in_features = x.shape[1]
    w = dense(weight, bits, group, in_features).to(torch.float64)
    if int8:
        a, t = quantize_activations(x)
        x = a.to(torch.float64) * t.to(torch.float64)
    else:
        x = x.to(torch.float64)
    largest = float(weight[1].max()) * 2.0 * grid_of(bits).levels
    size = (x.square().sum(1, keepdim=True) * largest**2).sqrt()
    y = x @ w.T
    return (y if bias is None else y + bias.to(torch.float64)), size + math.ulp(0.0)
