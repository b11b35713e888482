"""Direct training in the real Trainer: accumulation, clipping, schedulers, autocast, checkpointing, evaluation,
generation, compile, logs, and the deployed model."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback

import hf_lowbit as lb
from hf_lowbit.nn.arming import trainable_modules
from hf_lowbit.training.rules import RULES
from tests.quantizers.architectures import BY_ID, VOCABULARY
from tests.training.runs import MODES, TERNARY_FORWARD, Sentences, arguments, different, model, snapshot


# the name of the argument that all supported versions of transformers know
pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing` is deprecated:FutureWarning")


def train(folder, fields=None, callback=None, shift=0, resume=None, made=None, callbacks=(), **given):
    made = made or model(**(fields or TERNARY_FORWARD))
    callback = callback or lb.DQTCallback()
    trainer = Trainer(
        model=made,
        args=arguments(folder, **given),
        train_dataset=Sentences(shift),
        eval_dataset=Sentences(9),
        callbacks=[callback, *callbacks],
    )
    trainer.train(resume_from_checkpoint=resume)
    return made, trainer, callback


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_and_counts_changed_codes(mode, tmp_path):
    """Public report: huggingface/peft#1342."""
    before = snapshot(model(**MODES[mode]))
    made, trainer, callback = train(tmp_path, MODES[mode], learning_rate=1e-2)
    changed = different(before, snapshot(made))
    codes = {f"{name}.weight" for name, _ in trainable_modules(made)}
    assert codes <= set(changed) and len(codes) == 14
    assert callback.changed_codes > 0
    assert any(name.endswith("norm.weight") for name in changed), "the Trainer's optimizer trains the floats"
    scales = [name for name in changed if name.endswith("_scale")]
    assert bool(scales) == (mode == "8-learned-scale")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


# the rules with a rate of each layer's own need another learning rate: test_layerwise.py
OTHERS = sorted(name for name, rule in RULES.items() if not hasattr(rule, "layerwise"))
PAIRS = list(zip(OTHERS, ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor"], strict=True))


@pytest.mark.parametrize(("rule", "optim"), PAIRS)
def test_any_rule_beside_any_optimizer_of_the_trainer(rule, optim, tmp_path):
    made, _, callback = train(tmp_path, callback=lb.DQTCallback(rule), max_steps=2, optim=optim)
    assert callback.changed_codes > 0
    assert len(callback.last_step.moved) == 14


def test_same_run_twice_is_the_same(tmp_path):
    assert different(snapshot(train(tmp_path)[0]), snapshot(train(tmp_path)[0])) == []


def test_gradient_checkpointing_gives_the_same_codes(tmp_path):
    plain, _, _ = train(tmp_path)
    checkpointed, _, _ = train(tmp_path, gradient_checkpointing=True)
    assert different(snapshot(plain), snapshot(checkpointed)) == []


def test_accumulated_batches_are_one_update(tmp_path):
    made, trainer, callback = train(
        tmp_path, gradient_accumulation_steps=4, per_device_train_batch_size=1, max_steps=3
    )
    assert callback.last_step and trainer.state.global_step == 3
    whole, _, _ = train(tmp_path, max_steps=3)
    codes = [torch.cat([m.codes().flatten() for _, m in trainable_modules(x)]).int() for x in (made, whole)]
    # the sums differ in the last bit, and with them a few codes by a level
    assert (codes[0] - codes[1]).abs().max() <= 2
    assert (codes[0] != codes[1]).float().mean() < 0.02


def test_clipping_is_by_the_global_norm_of_all_parameters(tmp_path):
    """SGD without momentum sees the norm: a hundredth of it moves a hundredth as far."""
    levels = []
    for norm in (1e-1, 1e-3):
        callback = lb.DQTCallback("sgd", momentum=0.0)
        _, trainer, _ = train(tmp_path, {"bits": 8}, callback, max_steps=1, max_grad_norm=norm, learning_rate=0.5)
        assert trainer.state.log_history[0]["grad_norm"] > 1
        levels.append(sum(moved.levels for moved in callback.last_step.moved.values()))
    assert levels[0] == pytest.approx(100 * levels[1], rel=0.2)


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "constant_with_warmup", "inverse_sqrt", "polynomial"])
def test_schedulers_and_warmup_set_the_step(scheduler, tmp_path):
    _, trainer, _ = train(tmp_path, lr_scheduler_type=scheduler, warmup_steps=3, max_steps=5)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    # the first step of a warmup has learning rate 0: no code moves
    assert logs[0]["learning_rate"] == 0 and logs[0]["dqt/changed_rate"] == 0
    assert logs[3]["dqt/step_levels"] > logs[1]["dqt/step_levels"] > 0


def test_learning_rate_scale(tmp_path):
    levels = []
    for factor in (1.0, 3.0):
        _, _, callback = train(tmp_path, callback=lb.DQTCallback(learning_rate_scale=factor), max_steps=1)
        levels.append(sum(moved.levels for moved in callback.last_step.moved.values()))
    assert levels[1] == pytest.approx(3 * levels[0], rel=0.05)


def test_bfloat16_autocast(tmp_path):
    made, trainer, callback = train(tmp_path, bf16=True)
    assert callback.changed_codes > 0
    assert trainer.state.log_history[-2]["loss"] < trainer.state.log_history[0]["loss"]


def test_bfloat16_model_with_bfloat16_gradients(tmp_path):
    made = model().to(torch.bfloat16)
    _, _, callback = train(tmp_path, made=made, callback=lb.DQTCallback(state_bits=8))
    assert callback.changed_codes > 0
    assert made.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


def test_gradients_in_bfloat16_for_a_float32_model(tmp_path):
    made = model(**TERNARY_FORWARD, grad_dtype="bfloat16")
    dtypes = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            dtypes.append({p.dtype for p in model.parameters() if p.requires_grad})

    made.model.layers[0].mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda p: dtypes.append(p.grad.dtype))
    train(tmp_path, made=made, max_steps=1, callbacks=[Look()])
    assert dtypes[0] == torch.bfloat16 and dtypes[1] == {torch.bfloat16, torch.float32}


def test_evaluation_and_generation_while_training(tmp_path):
    generated = []

    class Generate(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            model.eval()
            generated.append(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False))
            model.train()

    made, trainer, _ = train(tmp_path, eval_strategy="steps", eval_steps=2, callbacks=[Generate()])
    plain, _, _ = train(tmp_path)
    assert different(snapshot(made), snapshot(plain)) == []
    assert len(generated) == 6
    assert len([entry for entry in trainer.state.log_history if "eval_loss" in entry]) == 3


def test_deployed_model_is_the_trained_one(tmp_path):
    """Train, evaluate, save, reload, evaluate: the same loss, without a conversion. Then freeze: the same again.

    Public reports: microsoft/BitNet#107, #236 and #200, microsoft/unilm#1524.
    """
    made, trainer, _ = train(tmp_path)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(tmp_path / "out")
    frozen = lb.freeze(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    frozen.save_pretrained(tmp_path / "frozen")
    for folder in ("out", "frozen"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        if folder == "out":
            evaluation = Trainer(model=again, args=arguments(tmp_path), eval_dataset=Sentences(9))
            assert evaluation.evaluate()["eval_loss"] == loss
        made.eval()
        with torch.no_grad():
            assert torch.equal(again(Sentences(9).ids).logits, made(Sentences(9).ids).logits)
    size = {f: (tmp_path / f / "model.safetensors").stat().st_size for f in ("out", "frozen")}
    assert size["frozen"] < size["out"]


def test_best_model_is_loaded_at_the_end(tmp_path):
    made, trainer, _ = train(
        tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, learning_rate=1e-2,
    )  # fmt: skip
    best = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert different(snapshot(made), snapshot(best)) == []


def test_metrics_are_in_the_logs_and_in_every_report(tmp_path):
    seen = []

    class Report(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    callback = lb.DQTCallback(log_per_weight=True)
    made = model(**MODES["8-learned-scale"])
    trainer = Trainer(
        model=made, args=arguments(tmp_path, max_steps=2), train_dataset=Sentences(), callbacks=[Report()]
    )
    # behind the one that reports, as integrations are when a user's callback is added
    trainer.add_callback(callback)
    trainer.train()
    wanted = {"dqt/changed_rate", "dqt/step_levels", "dqt/saturation_rate", "dqt/scale_drift", "dqt/skipped_steps",
              "dqt/changed_rate/model.layers.0.mlp.up_proj.weight"}  # fmt: skip
    assert wanted <= set(seen[0]) and wanted <= set(trainer.state.log_history[0])
    assert 0 < seen[0]["dqt/changed_rate"] <= 1 and seen[0]["dqt/scale_drift"] > 0


def test_gpt2_and_other_architectures(tmp_path):
    for name in ("gpt2", "qwen2", "opt"):
        made = lb.quantize(BY_ID[name].build(), lb.DQTConfig(**TERNARY_FORWARD))
        _, _, callback = train(tmp_path, made=made, max_steps=2)
        assert callback.changed_codes > 0, name


def test_seq2seq_trainer(tmp_path):
    class Pairs(Sentences):
        def __getitem__(self, index):
            return {"input_ids": self.ids[index], "labels": self.ids[index]}

    made = lb.quantize(BY_ID["bart"].build(), lb.DQTConfig(bits=8))
    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=3e-3, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, predict_with_generate=True, eval_strategy="steps",
        eval_steps=2,
    )  # fmt: skip
    callback = lb.DQTCallback(state_bits=8)
    trainer = Seq2SeqTrainer(model=made, args=args, train_dataset=Pairs(), eval_dataset=Pairs(9), callbacks=[callback])
    trainer.train()
    assert callback.changed_codes > 0


def test_encoder_with_a_classification_head(tmp_path):
    class Labelled(Sentences):
        def __getitem__(self, index):
            return {"input_ids": self.ids[index], "labels": index % 3}

    made = lb.quantize(BY_ID["bert-classifier"].build(), lb.DQTConfig(bits=8))
    callback = lb.DQTCallback()
    Trainer(model=made, args=arguments(tmp_path), train_dataset=Labelled(), callbacks=[callback]).train()
    assert callback.changed_codes > 0 and type(made.classifier) is torch.nn.Linear


def test_optimizer_class_instead_of_the_callback(tmp_path):
    made = model()
    optimizer = lb.DQTOptimizer(made, lr=3e-3, state_bits=8)
    before = snapshot(made)
    trainer = Trainer(model=made, args=arguments(tmp_path), train_dataset=Sentences(), optimizers=(optimizer, None))
    trainer.train()
    assert len(different(before, snapshot(made))) > 14


class Small(torch.nn.Module):
    """A model that is traced in a second: a table, a low-bit layer, a loss."""

    def __init__(self):
        super().__init__()
        self.table, self.inner = torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, 16)

    def forward(self, input_ids, labels):
        return {"loss": (torch.tanh(self.inner(self.table(input_ids))) - 1).square().mean()}


def test_torch_compile_without_its_compiler(tmp_path):
    """`torch_compile` in the arguments, forward and backward traced: the codes of the eager run."""
    torch._dynamo.reset()
    found = []
    for compiled in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        torch.manual_seed(0)
        made = lb.quantize(Small(), lb.DQTConfig(bits=8))
        _, trainer, callback = train(tmp_path, made=made, max_steps=2, **compiled)
        assert callback.changed_codes > 0
        assert hasattr(trainer.model_wrapped, "_orig_mod") == bool(compiled)
        found.append(snapshot(made))
    assert different(*found) == []


@pytest.mark.slow
def test_torch_compile(tmp_path):
    """inductor, forward and backward, against eager."""
    eager, slow, _ = train(tmp_path, max_steps=4)
    compiled, fast, callback = train(tmp_path, max_steps=4, torch_compile=True)
    assert callback.changed_codes > 0
    for one, other in zip(slow.state.log_history, fast.state.log_history, strict=True):
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)


@pytest.mark.slow
def test_compiled_forward_and_backward_have_no_graph_break():
    made = model().eval()
    ids = Sentences().ids[:2]
    expected = made(input_ids=ids, labels=ids).loss
    expected.backward()
    grads = {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}
    made.zero_grad()
    torch._dynamo.reset()
    found = torch.compile(made, fullgraph=True, backend="aot_eager")(input_ids=ids, labels=ids).loss
    found.backward()
    assert torch.allclose(found, expected, rtol=1e-5)
    for name, parameter in made.named_parameters():
        if name in grads:
            assert torch.allclose(parameter.grad, grads[name], atol=1e-5 * float(grads[name].abs().max()) + 1e-7), name
