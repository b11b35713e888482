"""Prune-and-grow in the real Trainer: exact zeros at every step, exact targets, and refusals."""

import logging as python_logging

import pytest
import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import hf_lowbit as lb
from hf_lowbit.functional.block_masks import block_scores
from hf_lowbit.nn.block_sparse import BlockModule
from hf_lowbit.nn.sparsify import masked_modules, sparse_modules
from tests.quantizers.architectures import BY_ID
from tests.sparsity.runs import Watch, callback, dead, different, model, snapshot, train
from tests.training.runs import Sentences, arguments


@pytest.mark.parametrize(
    ("fields", "options", "given"),
    [
        pytest.param({}, {}, {}, id="default"),
        pytest.param({"balance": "none"}, {}, {}, id="unbalanced"),
        pytest.param({}, {"grow": "union"}, {}, id="union"),
        pytest.param({}, {"grow": "none", "score": "l1"}, {}, id="no-growth"),
        pytest.param({}, {"score": "act", "schedule": "linear"}, {}, id="activation-score"),
        pytest.param({"block_size": (16, 20)}, {}, {}, id="rectangular-and-padded"),
        pytest.param({"targets": "all"}, {"compute": "sparse"}, {}, id="attention-and-sparse-compute"),
        pytest.param({"balance": "none"}, {"compute": "sparse", "grow": "union"}, {}, id="unbalanced-sparse-compute"),
        pytest.param({}, {}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, id="accumulation-and-clipping"),
        pytest.param({}, {}, {"bf16": True}, id="autocast"),
        pytest.param({}, {}, {"gradient_checkpointing": True}, id="checkpointing"),
        pytest.param({}, {}, {"optim": "adafactor"}, id="adafactor"),
        pytest.param({"dense_layers": {"last": 1}, "overrides": {"down_proj": {"sparsity": 0.5}}}, {}, {},
                     id="dense-layers-and-overrides"),
    ],
)  # fmt: skip
def test_dead_blocks_are_zero_after_every_step(fields, options, given, tmp_path):
    """Public reports: IST-DASLab/sparsegpt#17, locuslab/wanda#24, neuralmagic/sparsify#278,
    neuralmagic/sparseml#2222.
    """
    made, watch = model(**fields), Watch()
    targets = {name: module.target for name, module in masked_modules(made)}
    trainer = train(tmp_path, made, callback(**options), watchers=[watch], **given)
    changes = [a != b for a, b in zip(map(str, watch.masks), map(str, watch.masks[1:]), strict=False)]
    # updates at 3, 6, ..., 15 at most: in between masks stay
    assert 2 <= sum(changes) and not any(changed for i, changed in enumerate(changes, 2) if i % 3 and i <= 15)
    assert not any(changes[15:])
    for name, module in sparse_modules(made):
        assert isinstance(module, BlockModule)
        grid = module.layout.grid
        blocks = grid[1] if fields.get("balance") != "none" else grid[0] * grid[1]
        kept = lb.configs.blast.kept_blocks(targets[name], blocks)
        assert module.layout.live_blocks == kept * (grid[0] if blocks == grid[1] else 1)
    assert trainer.state.log_history[-2]["blast/sparsity"] == pytest.approx(
        1 - sum(m.layout.live_blocks for _, m in sparse_modules(made))
        / sum(m.layout.blocks for _, m in sparse_modules(made))
    )  # fmt: skip


@pytest.mark.parametrize("architecture", ["gpt2", "bert-masked-lm", "bart", "t5-gated", "opt", "vit"])
def test_architectures(architecture, tmp_path):
    """Encoders, decoders and pairs: which layers are chosen, and that they are right once packed."""
    zoo = BY_ID[architecture]
    made = model(architecture)
    names = {name for name, _ in masked_modules(made)}
    assert names and not any("att" in name.lower() or "head" in name or "classifier" in name for name in names)
    made.train()
    for _, module in masked_modules(made):
        module.controlled = True
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    from hf_lowbit.sparsity.pruner import BlockPruner
    from hf_lowbit.sparsity.schedule import Schedule

    pruner = BlockPruner(made, Schedule(4, 1))
    pruner.attach()
    for step in range(1, 5):
        pruner.before_step(step)
        getattr(made(**zoo.inputs), zoo.output).square().mean().backward()
        optimizer.step()
        pruner.after_step(step, optimizer)
        optimizer.zero_grad()
    pruner.release()
    before = zoo(made.eval())
    lb.freeze(made)
    assert {name for name, m in sparse_modules(made) if isinstance(m, BlockModule)} == names
    # another order of summation
    torch.testing.assert_close(zoo(made), before, atol=1e-4, rtol=1e-4)


def test_gradients_are_those_of_masked_dense_autograd():
    torch.manual_seed(0)
    for architecture in ("llama", "gpt2"):
        for sparse in (False, True):
            made = model(architecture)
            name, module = next(iter(masked_modules(made)))
            module.mask = torch.rand(module.layout.grid) < 0.4
            module.controlled, module.sparse_compute = True, sparse
            with torch.no_grad():
                module.oriented().mul_(module.mask.repeat_interleave(8, 0).repeat_interleave(8, 1))
            module.train()
            x = torch.randn(2, 5, module.layout.in_features, requires_grad=True)
            target = torch.randn(2, 5, module.layout.out_features)
            (module(x) * target).sum().backward()
            elementwise = module.mask.repeat_interleave(8, 0).repeat_interleave(8, 1)
            weight = module.oriented().detach().clone().requires_grad_()
            reference = x.detach().clone().requires_grad_()
            (nn.functional.linear(reference, weight * elementwise, module.bias) * target).sum().backward()
            gradient = module.weight.grad.t() if module.layout.transposed else module.weight.grad
            torch.testing.assert_close(gradient, weight.grad, atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(x.grad, reference.grad, atol=1e-4, rtol=1e-5)


def test_growth_reads_the_gradient_of_the_whole_batch(tmp_path):
    """Under accumulation, the norm of the sum and not a sum of norms; before clipping."""
    seen = {}

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                module = model.model.layers[0].mlp.up_proj
                seen["dense"] = module.dense_gradient.clone()

    made = model()
    train(tmp_path, made, callback(), watchers=[Look()], max_steps=20, gradient_accumulation_steps=2,
          per_device_train_batch_size=2, learning_rate=0.0, max_grad_norm=1e-6)  # fmt: skip
    assert seen["dense"].abs().sum() > 1e-3
    assert torch.isfinite(block_scores(seen["dense"], (16, 16))).all()


def test_dead_gradients_do_not_count_in_the_norm(tmp_path):
    norms = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norms.append(float(torch.stack([g.norm() for g in grads]).norm()))

    made = model()
    trainer = train(tmp_path, made, callback(), watchers=[Look()], max_grad_norm=1e9)
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert norms == pytest.approx(logged, rel=1e-4)


@pytest.mark.parametrize("reset", [True, False])
def test_moments_of_changed_blocks(reset, tmp_path):
    """With the reset a regrown block starts without the momentum it died with."""
    made = model()
    train(
        tmp_path,
        made,
        callback(reset_optimizer_state=reset, grow_fraction=0.9),
        watchers=[] if not reset else [Watch()],
    )
    assert all(isinstance(m, BlockModule) for _, m in sparse_modules(made))


def test_training_without_the_callback_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="nothing prunes it.*BlastCallback"):
        train(tmp_path, model(), None)


def test_evaluation_and_frozen_weights_need_no_callback():
    made = model().train()
    with torch.no_grad():
        made(**BY_ID["llama"].inputs)
    for _, module in masked_modules(made):
        module.weight.requires_grad_(False)
    made(**BY_ID["llama"].inputs).logits.sum().backward()
    gradients = {name: p.grad is not None for name, p in made.named_parameters()}
    assert any(gradients.values())
    assert not any(gradients[f"{name}.weight"] for name, _ in masked_modules(made))


def test_a_dense_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no weight to prune.*BlastConfig"):
        train(tmp_path, BY_ID["llama"].build(), callback())


def test_a_packed_model_trains_its_live_blocks_without_the_callback(tmp_path):
    made = model()
    train(tmp_path / "1", made, callback())
    before = snapshot(made)
    with pytest.raises(ValueError, match="mask is final"):
        train(tmp_path / "2", made, callback())
    train(tmp_path / "3", made, None, max_steps=2)
    changed = different(before, snapshot(made))
    assert any(name.endswith("mlp.up_proj.weight") for name in changed)
    assert not any("col_indices" in name for name in changed)


def test_a_second_training_with_the_old_optimizer_is_refused(tmp_path):
    made = model()
    trainer = train(tmp_path, made, callback())
    lb.quantize(made, lb.BlastConfig(sparsity=0.75, block_size=8))
    with pytest.raises(ValueError, match="not in the Trainer's optimizer"):
        trainer.train()


def test_pruning_further(tmp_path):
    made = model(sparsity=0.5)
    train(tmp_path / "1", made, callback())
    mask = made.model.layers[0].mlp.up_proj.mask.clone()
    lb.quantize(made, lb.BlastConfig(sparsity=0.75, block_size=8))
    assert torch.equal(made.model.layers[0].mlp.up_proj.mask, mask)
    train(tmp_path / "2", made, callback(initial_sparsity=0.5))
    assert made.model.layers[0].mlp.up_proj.measured_sparsity == 0.75
    with pytest.raises(ValueError, match="`block_size`="):
        lb.quantize(made, lb.BlastConfig(sparsity=0.9, block_size=32))


def test_schedule_longer_than_training_still_reaches_the_target(tmp_path, caplog):
    made = model()
    with caplog.at_level(python_logging.WARNING):
        train(tmp_path, made, callback(total_steps=1000), max_steps=10)
    assert "pruned from" in caplog.text and "at once" in caplog.text
    assert {m.measured_sparsity for _, m in sparse_modules(made)} == {0.75}


def test_early_stop_keeps_the_sparsity_it_has(tmp_path, caplog):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 7

    made = model()
    with caplog.at_level(python_logging.WARNING):
        train(tmp_path, made, callback(), watchers=[Stop()])
    measured = made.model.layers[0].mlp.up_proj.measured_sparsity
    assert "training stopped at step 7" in caplog.text and 0 < measured < 0.75
    made.save_pretrained(tmp_path / "saved")
    again = type(made).from_pretrained(tmp_path / "saved")
    assert again.model.layers[0].mlp.up_proj.measured_sparsity == measured
    layouts = again.config.quantization_config.layouts
    assert layouts["model.layers.0.mlp.up_proj"].sparsity == measured


def test_best_model_at_the_end(tmp_path, caplog):
    made = model()
    args = arguments(
        tmp_path, max_steps=20, eval_strategy="steps", eval_steps=5, save_strategy="steps", save_steps=5,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
    )  # fmt: skip
    trainer = Trainer(model=made, args=args, train_dataset=Sentences(), eval_dataset=Sentences(),
                      callbacks=[callback(), EarlyStoppingCallback(10)])  # fmt: skip
    with caplog.at_level(python_logging.WARNING):
        trainer.train()
    # the worst model is the first, before most was pruned
    assert "their masks are those of the weights now" in caplog.text
    assert made.model.layers[0].mlp.up_proj.measured_sparsity < 0.75
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, abs=1e-5)


def test_masks_are_not_packed_where_it_is_not_wanted(tmp_path):
    made = model()
    train(tmp_path, made, callback(pack=False))
    for _, module in masked_modules(made):
        assert module.measured_sparsity >= 0.6 and (dead(module) == 0).all()
    lb.freeze(made)
    assert all(isinstance(m, BlockModule) for _, m in sparse_modules(made))


def test_freezing_before_anything_was_pruned_is_refused():
    with pytest.raises(ValueError, match="nothing to freeze"):
        lb.freeze(model())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_size": 0}, "`step_size`=0"),
        ({"decay": 1.0}, "`decay`=1.0"),
        ({"decay": -1}, "`decay`=-1"),
        ({"schedule": "cosine"}, "`schedule`='cosine'"),
        ({"score": "wanda"}, "`score`='wanda'"),
        ({"grow": "all"}, "`grow`='all'"),
        ({"grow_fraction": 1.0}, "`grow_fraction`=1.0"),
        ({"initial_sparsity": 1.0}, "`initial_sparsity`=1.0"),
        ({"compute": "fast"}, "`compute`='fast'"),
        ({"total_steps": 0}, "`total_steps`=0"),
        ({"decay": float("nan")}, "`decay`=nan must be"),
        ({"temperature": float("inf")}, "`temperature`=inf must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        lb.BlastCallback(**options)
