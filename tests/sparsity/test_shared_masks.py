"""`share_gate_up_mask`: gate and up projections of a gated MLP lose the same blocks."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.functional.block_masks import best_blocks, block_scores
from hf_lowbit.nn.sparsify import masked_modules, sparse_modules
from hf_lowbit.quantizers.sparse import prune_once
from hf_lowbit.sparsity.pruner import BlockPruner
from hf_lowbit.sparsity.schedule import Schedule
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
