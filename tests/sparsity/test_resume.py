"""A resumed run continues bit for bit: masks (newborn blocks included), weights, moments, losses."""

import logging as python_logging

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from tests.sparsity.runs import Watch, callback, different, model, snapshot, train


@pytest.mark.parametrize(
    ("options", "given"),
    [
        pytest.param({}, {}, id="default"),
        pytest.param({"grow": "union", "compute": "sparse"}, {}, id="union-sparse-compute"),
        pytest.param({"score": "act"}, {"gradient_accumulation_steps": 2}, id="activation-score-accumulation"),
        pytest.param({}, {"bf16": True}, id="autocast"),
    ],
)
@pytest.mark.parametrize("step", [6, 9, 18])
def test_resume(options, given, step, tmp_path):
    """Public reports: IST-DASLab/sparsegpt#17, neuralmagic/sparseml#2222."""
    given = {**given, "save_strategy": "steps", "save_steps": 3}
    whole, resumed = model(), model()
    first = train(tmp_path / "whole", whole, callback(**options), **given)
    watch = Watch()
    second = train(tmp_path / "resumed", resumed, callback(**options), str(tmp_path / "whole" / f"checkpoint-{step}"),
                   watchers=[watch], **given)  # fmt: skip
    assert different(snapshot(whole), snapshot(resumed)) == []
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (first, second)]
    assert losses[0] == losses[1]
    states = [
        torch.load(tmp_path / f / "checkpoint-18" / "optimizer.pt", weights_only=True)["state"]
        for f in ("whole", "resumed")[: 2 if step < 18 else 1]
    ]
    for state in states[1:]:
        assert state["hf_lowbit_blast"]["schedule"] == states[0]["hf_lowbit_blast"]["schedule"]
        for name, mask in states[0]["hf_lowbit_blast"]["masks"].items():
            assert torch.equal(mask, state["hf_lowbit_blast"]["masks"][name])


def test_resume_of_a_model_loaded_from_the_checkpoint(tmp_path):
    whole = model()
    train(tmp_path / "whole", whole, callback(), save_strategy="steps", save_steps=6)
    checkpoint = tmp_path / "whole" / "checkpoint-6"
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert 0 < loaded.config.quantization_config.layouts["model.layers.0.mlp.up_proj"].sparsity < 0.75
    train(tmp_path / "resumed", loaded, callback(), str(checkpoint))
    assert different(snapshot(whole), snapshot(loaded)) == []


def test_other_blocks_are_refused(tmp_path):
    train(tmp_path / "whole", model(), callback(), save_strategy="steps", save_steps=9)
    with pytest.raises(ValueError, match="resume with the `block_size`"):
        train(tmp_path / "other", model(block_size=32), callback(), str(tmp_path / "whole" / "checkpoint-9"))


def test_another_schedule_is_reported(tmp_path, caplog):
    train(tmp_path / "whole", model(), callback(), save_strategy="steps", save_steps=9)
    with caplog.at_level(python_logging.WARNING):
        train(tmp_path / "other", model(), callback(step_size=4), str(tmp_path / "whole" / "checkpoint-9"))
    assert "another schedule" in caplog.text


def test_a_checkpoint_in_training_is_an_ordinary_dense_one(tmp_path):
    """Zeros under the dense names and shapes: readable by anything, and by `dequantize`."""
    whole = model()
    train(tmp_path / "whole", whole, callback(), save_strategy="steps", save_steps=9)
    dense = AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole" / "checkpoint-9", quantization_config=lb.BlastConfig(dequantize=True)
    )
    weight = dense.model.layers[0].mlp.up_proj.weight
    assert type(dense.model.layers[0].mlp.up_proj) is torch.nn.Linear and 0.1 < (weight == 0).float().mean() < 0.9
