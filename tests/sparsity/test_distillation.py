"""Distillation while blocks go: the formula, the mix in the real Trainer, and what takes no part."""

import pytest
import torch

import hf_lowbit as lb
from hf_lowbit.sparsity.distillation import Distillation, distillation_loss
from tests.quantizers.architectures import BY_ID
from tests.sparsity.runs import callback, different, model, snapshot, train


def test_formula():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 5, 7, generator=generator, dtype=torch.float64)
    counts = torch.rand(3, 5, generator=generator) < 0.6
    p, q = (torch.softmax(logits / 3, -1) for logits in (teacher, student))
    divergence = (p * (p / q).log()).sum(-1)
    for given, expected in (({}, divergence.mean()), ({"counts": counts}, divergence[counts].mean()),
                            ({"counts": counts, "count": 40}, divergence[counts].sum() / 40)):  # fmt: skip
        loss = distillation_loss(student, teacher, given.get("counts"), 3.0, given.get("count"))
        torch.testing.assert_close(loss.double(), 9 * expected, atol=1e-5, rtol=1e-5)
    assert float(distillation_loss(student, student, None, 2.0)) == pytest.approx(0, abs=1e-6)
    assert float(distillation_loss(student, teacher, torch.zeros(3, 5, dtype=torch.bool), 2.0)) == 0
    with pytest.raises(ValueError, match="name the same classes"):
        distillation_loss(student, teacher[..., :4], None, 1.0)


@pytest.mark.parametrize("architecture", ["llama", "bert-classifier"])
def test_the_loss_of_a_training_forward_is_mixed(architecture):
    """By hand: shifted positions of a causal model whose labels count, and every example of a classifier."""
    zoo = BY_ID[architecture]
    student, teacher = zoo.build().train(), zoo.build()
    for module in student.modules():
        if isinstance(module, torch.nn.Dropout):
            # two passes are compared
            module.p = 0.0
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.1)
    inputs = dict(zoo.inputs)
    if architecture == "llama":
        inputs["labels"] = inputs["input_ids"].clone()
        inputs["labels"][:, -2:] = -100
    else:
        inputs["labels"] = torch.zeros(len(inputs["input_ids"]), dtype=torch.long)
    with torch.no_grad():
        plain = student(**inputs)
    told = teacher.eval()(**{k: v for k, v in inputs.items() if k != "labels"}).logits
    if architecture == "llama":
        expected = distillation_loss(plain.logits[:, :-3], told[:, :-3], None, 2.0)
    else:
        expected = distillation_loss(plain.logits, told, None, 2.0)
    distillation = Distillation(student, teacher, 0.3, 2.0)
    mixed = student(**inputs)
    torch.testing.assert_close(mixed.loss, 0.7 * plain.loss + 0.3 * expected)
    assert distillation.last == pytest.approx(float(expected.detach()), rel=1e-5) and distillation.last > 0
    mixed.loss.backward()
    assert all(p.grad is None for p in teacher.parameters())
    # evaluation is what it was, and so is everything once it is released
    assert torch.equal(student.eval()(**inputs).loss, plain.loss)
    distillation.release()
    assert torch.equal(student.train()(**inputs).loss, plain.loss)


def test_in_the_trainer(tmp_path):
    """Accumulation changes nothing, the pull towards the teacher is felt, and the end leaves no trace."""
    teacher = BY_ID["llama"].build()
    ends = {}
    for name, weight, given in (
        ("none", 0.0, {}), ("half", 0.5, {}),
        ("accumulated", 0.5, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    ):  # fmt: skip
        made = model()
        blast = callback(teacher=teacher, distill_weight=weight)
        trainer = train(tmp_path / name, made, blast, max_steps=8, **given)
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        ends[name] = made, logs
        assert "blast/distillation" in logs[0] and not made._forward_hooks
    plain = model()
    train(tmp_path / "plain", plain, callback(), max_steps=8)
    assert different(snapshot(plain), snapshot(ends["none"][0])) == []
    distances = [ends[name][1][-1]["blast/distillation"] for name in ("none", "half")]
    assert distances[0] > distances[1]
    # another order of summation
    assert ends["half"][1][0]["loss"] == pytest.approx(ends["accumulated"][1][0]["loss"], rel=1e-4)


def test_a_folder_is_loaded_as_the_models_class(tmp_path):
    BY_ID["llama"].build().save_pretrained(tmp_path / "dense")
    one, other = model(), model()
    train(tmp_path / "1", one, callback(teacher=str(tmp_path / "dense")), max_steps=4)
    train(tmp_path / "2", other, callback(teacher=BY_ID["llama"].build()), max_steps=4)
    assert different(snapshot(one), snapshot(other)) == []


def test_with_codes(tmp_path):
    made = model(bits=8, rest=lb.DQTConfig(8))
    blast = callback(teacher=BY_ID["llama"].build())
    trainer = train(tmp_path, made, blast, watchers=[lb.DQTCallback()], max_steps=8)
    assert trainer.state.log_history[0]["blast/distillation"] > 0


def test_a_loss_formed_elsewhere_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`teacher`: LlamaForCausalLM returned no loss.*label_smoothing_factor"):
        train(tmp_path, model(), callback(teacher=BY_ID["llama"].build()), label_smoothing_factor=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": 3}, "`teacher` must be a model"),
        ({"distill_weight": 1.5}, "`distill_weight`=1.5"),
        ({"temperature": 0}, "`temperature`=0"),
    ],
    ids=["teacher", "weight", "temperature"],
)
def test_bad_options(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        lb.BlastCallback(**options)
