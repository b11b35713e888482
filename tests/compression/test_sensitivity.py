"""Costs of schemes against the loss that they really add, and their side effects: none."""

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from hf_lowbit.compression.sensitivity import _rounded, candidates, fisher, options
from hf_lowbit.configs.lowbit import LowBitConfig
from hf_lowbit.nn.packed import PackedWeight
from hf_lowbit.nn.targets import find_targets


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    return LlamaForCausalLM(config)


def targets_of(model):
    return [t for t in find_targets(model, LowBitConfig(bits=4, group_size=None)) if t.packed is not None]


def batches():
    return [
        {"input_ids": torch.randint(0, 128, (1, 48), generator=torch.Generator().manual_seed(i))} for i in range(4)
    ]


def test_the_fisher_is_the_mean_squared_gradient():
    model = llama().train()
    model.model.norm.weight.requires_grad_(False)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    targets = targets_of(model)
    found = fisher(model, targets, batches())
    assert found.keys() == {t.name for t in targets}
    assert all(found[t.name].shape == t.module.weight.shape and float(found[t.name].min()) >= 0 for t in targets)
    assert all(float(f.sum()) > 0 for f in found.values())
    # nothing of the model has changed
    assert model.training and not model.model.norm.weight.requires_grad
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    assert all(t.module.weight.grad is None and t.module.weight.requires_grad for t in targets)
    again = fisher(model, targets, batches())
    assert all(torch.equal(again[name], f) for name, f in found.items())


def test_costs_order_schemes_and_weights_as_the_divergence_does():
    model = llama().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4) if p.ndim == 2 else None
    targets = targets_of(model)
    importance = fisher(model, targets, batches() * 4)
    data = torch.cat([b["input_ids"] for b in batches()])
    with torch.no_grad():
        dense = model(data).logits.log_softmax(-1)
    predicted, real = [], []
    for target in targets:
        for option in options(target, candidates(64, bits=(2, 4)), importance[target.name]):
            kept = target.module.weight.detach().clone()
            with torch.no_grad():
                target.module.weight.copy_(_rounded(kept, PackedWeight(option.scheme, tuple(kept.shape))))
                logits = model(data).logits.log_softmax(-1)
                target.module.weight.copy_(kept)
            predicted.append(option.cost)
            real.append(float((dense.exp() * (dense - logits)).sum(-1).mean()))
    ranks = [torch.tensor(v).argsort().argsort().double() for v in (predicted, real)]
    assert float(torch.corrcoef(torch.stack(ranks))[0, 1]) > 0.8


def test_models_without_logits():
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                 num_attention_heads=2), add_pooling_layer=False)  # fmt: skip
    rows = [{**b, "attention_mask": (torch.arange(48) < 40).long()[None]} for b in batches()]
    found = fisher(model, targets_of(model), rows)
    assert all(float(f.sum()) > 0 for f in found.values())


def test_without_data_more_bits_cost_less():
    for target in targets_of(llama()):
        costs = [o.cost for o in options(target, candidates(64), None)]
        assert costs == sorted(costs, reverse=True) and costs[-1] > 0


def test_nan_is_named():
    model = llama()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN or infinity"):
        fisher(model, targets_of(model), batches())


def test_what_no_token_reached_is_not_worthless():
    model = llama()
    with torch.no_grad():
        # nothing comes out of this block's gate: no gradient reaches what is behind it
        model.model.layers[1].mlp.gate_proj.weight.zero_()
    found = fisher(model, targets_of(model), batches())
    unreached = found["model.layers.1.mlp.down_proj"]
    others = [f for name, f in found.items() if "layers.1.mlp" not in name]
    assert float(unreached.min()) == float(unreached.max()) > 0
    assert min(float(f.mean()) for f in others) < float(unreached.mean()) < max(float(f.mean()) for f in others)
