"""Layers that read the same x, for the tests of nn/sharing.py."""

import torch
from torch import nn

import hf_lowbit as lb
from hf_lowbit.kernels import separate_products
from hf_lowbit.nn import sharing
from tests.nn.models import random


WIDTH, ROWS = 64, sharing.FEWEST_ROWS


class Attention(nn.Module):
    """q, k and v read x, o reads what they give."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, n) for n in (WIDTH, 32, 32, WIDTH))

    def forward(self, x, between=lambda: None):
        q = self.q(x)
        between()
        k, v = self.k(x), self.v(x)
        return self.o(q + torch.cat([k, v], -1))


def attention(bits=4, group_size=32, **fields):
    return lb.quantize(Attention().eval(), lb.LowBitConfig(bits=bits, group_size=group_size, **fields))


def learned(**fields):
    """A model that has seen enough calls to know who reads the same input, and to give up on `o`."""
    model = attention(**fields)
    for seed in range(sharing.TRIES + 1):
        model(random(1, ROWS, WIDTH, seed=seed))
    return model


def alone(model, x, *rest):
    with separate_products():
        return model(x, *rest)


def reasons(model):
    return {row.name: row.sharing for row in lb.report(model).modules if row.scheme is not None}
