"""What direct training refuses, with a sentence; and what it warns about."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback

import hf_lowbit as lb
from tests.quantizers.architectures import BY_ID
from tests.training.runs import MODES, Sentences, arguments, different, model, snapshot


def trainer(folder, made, callbacks, **fields):
    optimizers = fields.pop("optimizers", (None, None))
    return Trainer(model=made, args=arguments(folder, **fields), train_dataset=Sentences(), callbacks=callbacks,
                   optimizers=optimizers)  # fmt: skip


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_trainer_without_the_callback_refuses_and_no_code_moves(optim, tmp_path):
    """Public report: huggingface/peft#1342."""
    made = model()
    before = snapshot(made)
    with pytest.raises(RuntimeError, match="DQTCallback"):
        trainer(tmp_path, made, [], optim=optim).train()
    assert not any("proj" in name for name in different(before, snapshot(made)))


def test_two_callbacks(tmp_path):
    with pytest.raises(ValueError, match="two DQTCallbacks"):
        trainer(tmp_path, model(), [lb.DQTCallback(), lb.DQTCallback()]).train()


def test_callback_beside_the_optimizer_class(tmp_path):
    made = model()
    with pytest.raises(ValueError, match="not both"):
        trainer(tmp_path, made, [lb.DQTCallback()], optimizers=(lb.DQTOptimizer(made), None)).train()


def test_callback_without_anything_to_train(tmp_path):
    with pytest.raises(ValueError, match="it has none"):
        trainer(tmp_path, BY_ID["llama"].build(), [lb.DQTCallback()]).train()
    made = model()
    for module in made.modules():
        if hasattr(module, "training_form"):
            module.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen"):
        trainer(tmp_path, made, [lb.DQTCallback()]).train()


def test_a_callback_serves_one_run_after_another(tmp_path):
    callback, made = lb.DQTCallback(), model()
    trainer(tmp_path, made, [callback], max_steps=1).train()
    trainer(tmp_path, made, [callback], max_steps=1).train()
    assert callback.updater is None


def test_an_aborted_run_does_not_block_the_next(tmp_path):
    class Abort(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    made, callback = model(), lb.DQTCallback()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, made, [callback, Abort()]).train()
    trainer(tmp_path, made, [callback], max_steps=1).train()
    trainer(tmp_path, made, [lb.DQTCallback()], max_steps=1).train()


def test_loss_scaling(tmp_path):
    args = arguments(tmp_path)
    args.fp16 = True
    with pytest.raises(ValueError, match="`fp16`"):
        callback = lb.DQTCallback()
        made = model()
        callback.on_train_begin(args, None, None, model=made, optimizer=torch.optim.AdamW(made.parameters()))


@pytest.mark.parametrize("field", ["deepspeed", "fsdp"])
def test_sharded_training(field, tmp_path):
    args = arguments(tmp_path)
    setattr(args, field, "anything")
    made = model()
    with pytest.raises(ValueError, match=f"`{field}`"):
        lb.DQTCallback().on_train_begin(args, None, None, model=made, optimizer=torch.optim.AdamW(made.parameters()))


def test_fsdp_through_accelerate(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    with pytest.raises(ValueError, match="`fsdp`"):
        lb.DQTCallback().on_train_begin(arguments(tmp_path), None, None, model=made, optimizer=optimizer)


def test_weights_without_a_learning_rate(tmp_path):
    made = model()
    optimizer = torch.optim.AdamW([made.model.norm.weight], lr=1e-3)
    with pytest.raises(ValueError, match="no parameter group"):
        trainer(tmp_path, made, [lb.DQTCallback()], optimizers=(optimizer, None)).train()


class Poison(TrainerCallback):
    """Writes NaN into a gradient of some steps, before the callback under test looks."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        bad, weight = state.global_step in self.steps, model.model.norm.weight
        if bad:
            weight.register_post_accumulate_grad_hook(self._write)
        self.bad = bad

    def _write(self, parameter):
        if self.bad:
            parameter.grad.fill_(float("nan"))


@pytest.mark.parametrize("norm", [0.0, 1.0], ids=["unclipped", "clipped"])
def test_a_step_with_nan_is_skipped_for_all_parameters(norm, tmp_path, caplog):
    made, callback = model(), lb.DQTCallback()
    run = trainer(tmp_path, made, [Poison({1}), callback], max_grad_norm=norm, max_steps=2)
    logger = logging.getLogger("transformers")
    logger.propagate = True
    states = []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            states.append(snapshot(model))

    run.add_callback(Keep())
    with caplog.at_level("WARNING"):
        run.train()
    assert different(states[0], states[1]) == []
    assert callback.last_step.skipped
    assert run.state.log_history[1]["dqt/skipped_steps"] == 1


def test_many_steps_with_nan_stop_the_run(tmp_path):
    made = model()
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        trainer(tmp_path, made, [Poison(set(range(1, 9))), lb.DQTCallback(max_skips=3)], max_steps=9).train()
    assert all(bool(torch.isfinite(t.float()).all()) for t in made.state_dict().values())


def warnings_of(monkeypatch, tmp_path, fields, rate, steps=12):
    from hf_lowbit.training import callback as callback_module
    from hf_lowbit.training import monitor

    said = []
    monkeypatch.setattr(monitor.logger, "warning", said.append)
    monkeypatch.setattr(callback_module.logger, "warning", said.append)
    trainer(
        tmp_path, model(**fields), [lb.DQTCallback()], learning_rate=rate, max_steps=steps, logging_steps=6
    ).train()
    return " ".join(said)


def test_a_rate_that_jumps_over_the_grid_is_warned_about(monkeypatch, tmp_path):
    assert "range" in warnings_of(monkeypatch, tmp_path, MODES["ternary"], 1.0)


def test_a_rate_that_moves_nothing_is_warned_about(monkeypatch, tmp_path):
    said = warnings_of(monkeypatch, tmp_path, MODES["ternary"], 1e-9)
    assert "almost nothing" in said and "no code has changed" in said


def test_a_sensible_rate_is_not(monkeypatch, tmp_path):
    assert warnings_of(monkeypatch, tmp_path, MODES["8"], 1e-3) == ""


def test_adapters_on_top_train_without_the_callback(tmp_path):
    base = model()
    before = snapshot(base)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    trainer(tmp_path, adapted, [], max_steps=2).train()
    after = {n.replace(".base_layer", ""): t for n, t in snapshot(adapted.base_model.model).items() if "lora" not in n}
    assert different(before, after) == []
    assert any(p.abs().sum() > 0 for n, p in adapted.named_parameters() if "lora_B" in n)


def test_adapters_are_not_merged_into_codes(tmp_path):
    adapted = get_peft_model(model(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    with pytest.raises(RuntimeError, match="trainable low-bit weight"):
        adapted.merge_and_unload()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"optimizer": "adam"}, "`optimizer`='adam'"),
        ({"state_bits": 5}, "`state_bits`=5"),
        ({"beta1": 0.9}, "no option `beta1`"),
        ({"learning_rate_scale": 0}, "`learning_rate_scale`=0"),
        ({"check_replicas_every": 0}, "`check_replicas_every`=0"),
    ],
)
def test_wrong_arguments_are_named_at_once(fields, match):
    with pytest.raises((TypeError, ValueError), match=match):
        lb.DQTCallback(**fields)


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_optimizer_of_a_sharded_model(one_process):
    from torch.distributed.fsdp import fully_shard

    made = model(bits=8)
    fully_shard(made)
    with pytest.raises(ValueError, match=r"shard of FSDP.*Train with DDP"):
        lb.DQTOptimizer(made)


@pytest.mark.parametrize("whole", [True, False], ids=["model", "parameters"])
def test_model_that_is_sharded_after_its_optimizer_was_made(one_process, whole):
    """The optimizer would hold weights that nobody uses, and train nothing."""
    from torch.distributed.fsdp import fully_shard

    made = model(bits=8)
    optimizer = lb.DQTOptimizer(made if whole else list(made.named_parameters()))
    fully_shard(made)
    ids = torch.arange(8)[None]
    with pytest.raises(ValueError, match="Train with DDP"):
        made(input_ids=ids, labels=ids)
    with pytest.raises(ValueError, match="Train with DDP"):
        optimizer.step()


def test_optimizer_where_accelerate_shards(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP"):
        lb.DQTOptimizer(model(bits=8))
