"""Small models for the layer tests: dense, and converted the way `hf_lowbit.quantize` does it."""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import hf_lowbit as lb
from hf_lowbit.functional.dispatch import use_kernel


def random(*shape, seed=0, dtype=torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Layers(nn.Module):
    """One layer of each plain kind; 10 inputs are no multiple of the group sizes used."""

    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(10, 6, bias=bias)
        self.conv1d = Conv1D(6, 10)
        self.embedding = nn.Embedding(12, 10, padding_idx=1)
        with torch.no_grad():
            self.conv1d.weight.normal_()
            self.conv1d.bias.normal_()


def converted(model, bits=4, group_size=4, symmetric=None, activations="float"):
    """Everything of `model` that can be, in one scheme."""
    scheme = lb.Scheme(bits, group_size, symmetric, activations)
    return lb.quantize(model, lb.LowBitConfig(modules={"re:.*": scheme}))


def by_reference(module, *inputs, **named):
    """A forward pass by the reference kernel, whose numbers are the definition."""
    with torch.no_grad(), use_kernel("reference"):
        return module(*inputs, **named)
