"""What GPTQ leaves of rounding errors: predicted from H alone, against what the solver really leaves."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_lowbit.compression import plan as planning
from hf_lowbit.compression.compensation import _share, shares
from hf_lowbit.compression.solvers.gptq import factorize, solve
from hf_lowbit.configs.lowbit import LowBitConfig
from hf_lowbit.configs.scheme import Scheme
from hf_lowbit.functional.grid import dequantize, grid_of
from hf_lowbit.functional.rounding import round_to_nearest
from hf_lowbit.nn.targets import find_targets


def inputs(rows: int, width: int, rank: int) -> torch.Tensor:
    """Correlated activations: a few directions carry most of them."""
    generator = torch.Generator().manual_seed(0)
    strong = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, width, generator=generator)
    return strong + 0.3 * torch.randn(rows, width, generator=generator)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_the_prediction_is_near_what_the_solver_leaves(bits):
    x = inputs(512, 128, 12)
    hessian = x.t() @ x
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    scheme = Scheme(bits, 32)
    rounded = round_to_nearest(weight, grid_of(bits), 32, None)
    squares = (dequantize(*rounded, 32) - weight).square()
    plain = float((squares * hessian.diagonal()).sum())
    predicted = float((squares * hessian.diagonal() * _share(factorize(hessian), hessian.diagonal())).sum())
    difference = dequantize(*solve([weight], hessian, [scheme], refine=False)[0].quantized, 32) - weight
    real = float((difference @ hessian * difference).sum())
    assert 0.6 < predicted / real < 1.6
    assert real < 0.5 * plain


def test_inputs_that_do_not_hang_together_leave_everything():
    hessian = torch.diag(torch.tensor([3.0, 1.0, 0.0, 2.0]))
    assert torch.allclose(_share(factorize(hessian), hessian.diagonal()), torch.ones(4), atol=0.02)


def test_every_layer_that_is_solved_has_a_share_and_nothing_else(monkeypatch):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                                         num_attention_heads=2)).train()  # fmt: skip
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [{"input_ids": torch.randint(64, (1, 40))} for _ in range(2)]
    targets = [
        t for t in find_targets(model, LowBitConfig(modules={"model.embed_tokens": Scheme(8, None)})) if t.packed
    ]
    whole = shares(model, targets, batches)
    assert whole.keys() == {t.name for t in targets if t.kind == "linear"}
    assert all(bool((s >= 0).all()) and bool((s <= 1).all()) and float(s.mean()) < 1 for s in whole.values())
    # in parts that hold one layer each the same comes out
    monkeypatch.setattr("hf_lowbit.compression.compensation.MOST_BYTES", 1)
    parts = shares(model, targets, batches)
    assert all(torch.equal(parts[name], share) for name, share in whole.items())
    assert model.training and not any(m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_plan_of_rounding_does_not_count_on_compensation():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64)).eval()
    batches = [{"input_ids": torch.randint(64, (1, 40))} for _ in range(2)]
    targets = [t for t in find_targets(model, LowBitConfig()) if t.packed]
    plain = planning._importance(model, targets, batches, "rtn", 0)
    solved = planning._importance(model, targets, batches, "gptq", 0)
    conv = next(t for t in targets if t.name.endswith("mlp.c_fc"))
    # the input of a Conv1D comes first: a share a row of its weight
    share = shares(model, targets, batches)[conv.name]
    assert torch.equal(solved[conv.name], plain[conv.name] * share[:, None])
    assert float(solved[conv.name].sum()) < float(plain[conv.name].sum())
