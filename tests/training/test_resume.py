"""A resumed run continues bit for bit: codes, scales, floats, states, losses."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

import hf_lowbit as lb
from hf_lowbit.training.rules import RULES
from tests.training.runs import MODES, Sentences, arguments, different, model, snapshot


def train(folder, made, callback, resume=None, **fields):
    trainer = Trainer(
        model=made, args=arguments(folder, save_strategy="steps", save_steps=3, **fields), train_dataset=Sentences(),
        callbacks=[callback],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def check(tmp_path, fields, make_callback, **given):
    whole, resumed = model(**fields), model(**fields)
    first = train(tmp_path / "whole", whole, make_callback(), **given)
    checkpoint = str(tmp_path / "whole" / "checkpoint-3")
    second = train(tmp_path / "resumed", resumed, make_callback(), checkpoint, **given)
    assert different(snapshot(whole), snapshot(resumed)) == []
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (first, second)]
    assert losses[0] == losses[1]
    states = [
        torch.load(tmp_path / f / "checkpoint-6" / "optimizer.pt", weights_only=True) for f in ("whole", "resumed")
    ]
    one, other = (state["state"]["hf_lowbit"] for state in states)
    assert one.keys() == other.keys() and one["step"] == other["step"] == 6
    for name, tensors in one["weights"].items():
        assert all(
            torch.equal(torch.as_tensor(v), torch.as_tensor(other["weights"][name][k])) for k, v in tensors.items()
        )


@pytest.mark.parametrize("mode", ["8-learned-scale", "4-groups", "ternary"])
def test_every_mode(mode, tmp_path):
    check(tmp_path, MODES[mode], lb.DQTCallback)


@pytest.mark.parametrize(("rule", "state_bits"), list(zip(sorted(RULES), [32, 16, 8, 4, 8, 32], strict=True)))
def test_every_rule_and_state_width(rule, state_bits, tmp_path):
    check(tmp_path, MODES["8-ternary-forward"], lambda: lb.DQTCallback(rule, state_bits=state_bits))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"gradient_accumulation_steps": 2}, id="accumulation"),
        pytest.param({"bf16": True}, id="autocast"),
        pytest.param({"optim": "adafactor"}, id="other-optimizer"),
        pytest.param({"lr_scheduler_type": "cosine", "warmup_steps": 2}, id="scheduler"),
        pytest.param({"restore_callback_states_from_checkpoint": True}, id="callback-states"),
    ],
)
def test_with(given, tmp_path):
    check(tmp_path, MODES["8-ternary-forward"], lambda: lb.DQTCallback(state_bits=8), **given)


def test_a_model_loaded_from_a_checkpoint_resumes(tmp_path):
    whole = model()
    train(tmp_path / "whole", whole, lb.DQTCallback())
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    train(tmp_path / "resumed", loaded, lb.DQTCallback(), str(checkpoint))
    assert different(snapshot(whole), snapshot(loaded)) == []


def test_state_of_another_rule_is_refused(tmp_path):
    train(tmp_path / "whole", model(), lb.DQTCallback("lion"))
    with pytest.raises(ValueError, match="`optimizer`='lion'"):
        train(tmp_path / "other", model(), lb.DQTCallback(), str(tmp_path / "whole" / "checkpoint-3"))
