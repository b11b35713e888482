"""`share_gate_up_mask`: gate and up projections of a gated MLP lose the same blocks."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.functional import block_dispatch
from hf_lowbit.functional.block_masks import best_blocks, block_scores
from hf_lowbit.functional.blocks import reference_block_linear
from hf_lowbit.nn.gated import GatedBlocks
from hf_lowbit.nn.sparsify import masked_modules, sparse_modules
from hf_lowbit.quantizers.sparse import prune_once
from hf_lowbit.sparsity.pruner import BlockPruner
from hf_lowbit.sparsity.schedule import Schedule
from tests.quantizers.architectures import BY_ID
from tests.sparsity.runs import DIRECT, callback, different, model, snapshot, train


@pytest.mark.parametrize("architecture", ["llama", "t5-gated"])
def test_pairs(architecture):
    made = model(architecture, share_gate_up_mask=True)
    groups = {}
    for name, module in masked_modules(made):
        groups.setdefault(module.mask_group, []).append(name.rpartition(".")[2])
    alone = groups.pop(None)
    pair = ["gate_proj", "up_proj"] if architecture == "llama" else ["wi_0", "wi_1"]
    assert groups and all(names == pair for names in groups.values())
    assert set(alone) == ({"down_proj"} if architecture == "llama" else {"wo"})


def test_the_mask_is_that_of_the_sum_of_scores():
    made = model(share_gate_up_mask=True)
    mlp = made.model.layers[0].mlp
    scores = block_scores(mlp.gate_proj.weight, (8, 8)) + block_scores(mlp.up_proj.weight, (8, 8))
    own = best_blocks(block_scores(mlp.gate_proj.weight, (8, 8)), 2, "row")
    BlockPruner(made, Schedule(1, 1)).finish()
    expected = best_blocks(scores, 2, "row")
    assert torch.equal(mlp.gate_proj.mask, expected) and torch.equal(mlp.up_proj.mask, expected)
    assert not torch.equal(own, expected)


@pytest.mark.parametrize(
    ("fields", "options"),
    [({}, {}), ({}, {"score": "act", "compute": "sparse"}), (DIRECT, {"grow": "none"})],
    ids=["growth", "activation-score", "codes"],
)
def test_training_keeps_them_equal(fields, options, tmp_path):
    made = model(share_gate_up_mask=True, **fields)
    direct = [lb.DQTCallback()] if fields else []
    train(tmp_path / "run", made, callback(**options), watchers=direct, save_strategy="steps", save_steps=9)
    for layer in made.model.layers:
        assert torch.equal(layer.mlp.gate_proj.mask, layer.mlp.up_proj.mask)
        assert layer.mlp.up_proj.measured_sparsity == 0.75
    made.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.quantization_config.share_gate_up_mask is True
    assert different(snapshot(made), snapshot(again)) == []
    # a checkpoint of training goes on with one mask
    checkpoint = tmp_path / "run" / "checkpoint-9"
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert {m.mask_group for _, m in masked_modules(loaded)} == {None, "model.layers.0.mlp", "model.layers.1.mlp"}
    direct = [lb.DQTCallback()] if fields else []
    train(tmp_path / "resumed", loaded, callback(**options), str(checkpoint), watchers=direct)
    assert different(snapshot(made), snapshot(loaded)) == []


def test_one_shot_and_pruning_further():
    made = model(sparsity=0.5, share_gate_up_mask=True)
    prune_once(made)
    assert torch.equal(made.model.layers[0].mlp.gate_proj.mask, made.model.layers[0].mlp.up_proj.mask)
    lb.freeze(made)
    lb.quantize(made, lb.BlastConfig(0.75, 8, share_gate_up_mask=True))
    assert sum(module.mask_group is not None for _, module in sparse_modules(made)) == 4
    lb.quantize(made, lb.BlastConfig(0.75, 8))
    assert all(module.mask_group is None for _, module in sparse_modules(made))


def test_a_config_without_the_field_is_the_default():
    section = lb.BlastConfig().to_dict()
    assert "share_gate_up_mask" not in section["sparse"]
    assert lb.BlastConfig.from_dict(section).share_gate_up_mask is False
    shared = lb.BlastConfig(share_gate_up_mask=True)
    assert lb.BlastConfig.from_dict(shared.to_dict()) == shared != lb.BlastConfig()


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("gpt2", {}, "no pair of gate and up"),
        ("llama", {"overrides": {"up_proj": {"sparsity": 0.5}}}, "target 0.75.*and 0.5; make them equal"),
        ("llama", {"overrides": {"up_proj": {"block_size": 16}}}, "blocks .8, 8.*.16, 16."),
        ("llama", {"modules_to_not_convert": ["up_proj"]}, "no pair of gate and up"),
    ],
    ids=["no-gate", "targets", "blocks", "half-a-pair"],
)
def test_refusals(architecture, fields, message):
    with pytest.raises(ValueError, match=message):
        model(architecture, share_gate_up_mask=True, **fields)
    with pytest.raises(TypeError, match="`share_gate_up_mask`=1 must be True or False"):
        lb.BlastConfig(share_gate_up_mask=1)


class Fused:
    """A kernel for the CPU that brings `swiglu`, as Triton's does for CUDA devices, and counts its calls."""

    def __init__(self):
        self.calls = 0

    def swiglu(self, x, gate, up, columns, pointers, problem):
        self.calls += 1
        g, u = (reference_block_linear(x, values, columns, pointers, x.shape[1]) for values in (gate, up))
        return F.silu(g) * u

    def run(self, x, values, columns, pointers, problem, scale):
        return reference_block_linear(x, values, columns, pointers, x.shape[1])


@pytest.fixture
def fused(monkeypatch):
    kernel = Fused()
    monkeypatch.setattr(block_dispatch, "_kernels", list(block_dispatch._kernels))
    monkeypatch.setattr(block_dispatch, "_choices", {})
    block_dispatch.register_blocks(
        block_dispatch.BlockKernel("fused", 999, lambda problem: None, kernel.run, None, kernel.swiglu)
    )
    return kernel


@pytest.mark.parametrize("block_size", [8, (20, 16)], ids=["whole", "edges"])
def test_one_product_for_gate_and_up(block_size, fused, tmp_path):
    """Packed, pickled, reloaded, trained: wherever a kernel fuses, the MLP makes one call; dequantized, none."""
    made = model(share_gate_up_mask=True, block_size=block_size)
    BlockPruner(made, Schedule(1, 1)).finish()
    ids = torch.tensor([[1, 5, 9, 33]])
    wanted = copy.deepcopy(made).eval()(ids).logits
    lb.freeze(made).save_pretrained(tmp_path)
    for other in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made)),
                  AutoModelForCausalLM.from_pretrained(tmp_path)):  # fmt: skip
        before = fused.calls
        torch.testing.assert_close(other.eval()(ids).logits, wanted, atol=1e-5, rtol=1e-4)
        assert fused.calls == before + len(made.model.layers)
    other.train()(ids, labels=ids).loss.backward()
    assert (other.model.layers[0].mlp.gate_proj.weight.grad != 0).any()
    before, plain = fused.calls, type(other.dequantize().model.layers[0].mlp)
    assert plain is type(BY_ID["llama"].build().model.layers[0].mlp)
    torch.testing.assert_close(other.eval()(ids).logits, wanted, atol=1e-5, rtol=1e-4)
    assert fused.calls == before


def test_who_watches_or_changes_a_layer_gets_two_products(fused):
    made = model(share_gate_up_mask=True)
    BlockPruner(made, Schedule(1, 1)).finish()
    mlp, x = lb.freeze(made).eval().model.layers[0].mlp, torch.randn(2, 64)
    assert isinstance(mlp, GatedBlocks) and mlp.is_fused(x)
    handle = mlp.up_proj.register_forward_hook(lambda *_: None)
    assert not mlp.is_fused(x)
    handle.remove()
    assert mlp.is_fused(x) and not mlp.is_fused(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert not mlp.is_fused(x)
    with torch.no_grad():
        mlp.gate_proj.weight_col_indices[0, 0] ^= 1
    assert not mlp.is_fused(x)
    apart = model()
    BlockPruner(apart, Schedule(1, 1)).finish()
    assert not any(isinstance(module, GatedBlocks) for module in lb.freeze(apart).modules())
