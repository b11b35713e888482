"""Rounding by other libraries: all linear layers but the head, bits counted, what is absent or wrong left out."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.peers import weights


def absmax(layer, bits):
    """Stands in for a library: one scale a row."""
    weight = layer.weight.detach().float()
    scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (weight / scale).round() * scale, bits + 16 / weight.shape[1]


def test_every_layer_but_the_head_is_rounded(tiny_llama):
    dense = AutoModelForCausalLM.from_pretrained(tiny_llama)
    before = {name: p.clone() for name, p in dense.named_parameters()}
    model, average = weights.rounded(dense, absmax, 4)
    assert all(torch.equal(p, before[name]) for name, p in dense.named_parameters())
    after = dict(model.named_parameters())
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {f"{n}.weight" for n, m in dense.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    assert 4 < average < 5


def test_what_is_missing_or_wrong_is_named():
    def missing(layer, bits):
        import no_such_library  # noqa: F401

    assert weights.obstacle(absmax, 4) is None
    assert "no_such_library" in weights.obstacle(missing, 4)
    assert "off by" in weights.obstacle(lambda layer, bits: (torch.randn(layer.weight.shape), 4.0), 4)
