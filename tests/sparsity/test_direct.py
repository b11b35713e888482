"""Codes trained directly in blocks that are pruned: exact zeros, no noise in dead blocks, packed and resumed bit for
bit."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.functional.block_codes import dequantize_blocks
from hf_lowbit.nn.block_sparse import BlockModule
from hf_lowbit.nn.masked_codes import MaskedCodes
from hf_lowbit.nn.sparsify import masked_modules, pack_blocks, sparse_modules
from hf_lowbit.sparsity.pruner import BlockPruner
from hf_lowbit.sparsity.schedule import Schedule
from tests.quantizers.architectures import BY_ID
from tests.sparsity.runs import DIRECT, WatchCodes, callback, different, model, snapshot, train


FLOAT_BLOCKS = {"rest": lb.DQTConfig(8)}
LEARNED = {"bits": 8, "rest": lb.DQTConfig(4, group_size=16, scale="learned")}


def run(folder, fields=DIRECT, options=None, direct=None, watchers=(), **given):
    """Train codes with both callbacks; the model before it ran is the same each time."""
    made = model(**fields)
    callbacks = [callback(**(options or {})), lb.DQTCallback(**(direct or {})), *watchers]
    return made, train(folder, made, None, watchers=callbacks, **given)


@pytest.mark.parametrize(
    ("fields", "options", "direct", "given"),
    [
        pytest.param({}, {}, {}, {}, id="default"),
        pytest.param({"bits": 4, "balance": "none"}, {"grow": "union"}, {}, {}, id="4-bits-unbalanced-union"),
        pytest.param({"bits": "ternary"}, {"score": "act"}, {"state_bits": 16}, {}, id="ternary-activation-score"),
        pytest.param({"block_size": (16, 20)}, {}, {"state_bits": 8}, {}, id="rectangular-padded-8-bit-states"),
        pytest.param({"block_size": 9}, {}, {"state_bits": 4}, {}, id="odd-blocks-4-bit-states"),
        pytest.param({"targets": "all"}, {"compute": "sparse"}, {}, {}, id="sparse-compute"),
        pytest.param(LEARNED, {"compute": "sparse"}, {}, {}, id="learned-scales"),
        pytest.param({}, {}, {}, {"bf16": True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
                     id="autocast-accumulation-clipping"),
        pytest.param({}, {"grow": "none"}, {"optimizer": "lion"}, {}, id="lion"),
    ],
)  # fmt: skip
def test_dead_codes_do_not_move(fields, options, direct, given, tmp_path):
    watch = WatchCodes()
    made, trainer = run(tmp_path, {**DIRECT, **fields}, options, direct, [watch], **given)
    assert len(watch.masks) == 20 and not torch.equal(*(next(iter(watch.masks[i].values())) for i in (0, 19)))
    assert {type(m).__mro__[1] for _, m in sparse_modules(made)} == {BlockModule}
    assert {m.layout.bits for _, m in sparse_modules(made)} == {{**DIRECT, **fields}["bits"]}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    made.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert different(snapshot(made), snapshot(again)) == []
    inputs = BY_ID["llama"].inputs
    # autocast is wrapped around the trained model's forward
    made = trainer.accelerator.unwrap_model(made, keep_fp32_wrapper=False)
    assert torch.equal(made.eval()(**inputs).logits, again(**inputs).logits)
    rest = again.config.quantization_config.rest
    # with every linear layer in blocks there is none
    assert rest is None if fields.get("targets") == "all" else rest.training is None


def test_the_order_of_callbacks_does_not_matter(tmp_path):
    one, _ = run(tmp_path / "1")
    other = model(**DIRECT)
    train(tmp_path / "2", other, None, watchers=[lb.DQTCallback(), callback()])
    assert different(snapshot(one), snapshot(other)) == []


@pytest.mark.parametrize("bits", [8, 4, "ternary"])
@pytest.mark.parametrize("block", [(8, 8), (16, 20)], ids=["whole", "padded"])
@pytest.mark.parametrize("balance", ["row", "none"])
def test_packing_keeps_every_code(bits, block, balance):
    """What is stored are the trained codes and their scales: nothing is rounded once more."""
    made = model(bits=bits, block_size=block, balance=balance, rest=lb.DQTConfig(8))
    _, module = next(iter(masked_modules(made)))
    module.mask = torch.rand(module.layout.grid, generator=torch.Generator().manual_seed(0)) < 0.5
    if balance == "row":
        module.mask = (torch.arange(module.layout.grid[1]) % 2 == 0).expand(module.layout.grid).clone()
    module.clear()
    dense, scale = module.dense_weight(), module._parameters["weight_scale"].detach().clone()
    pack_blocks(module)
    assert torch.equal(module.dense_weight(), dense) and (dense != 0).any()
    assert (module.weight_scale > 0).all() and set(module.weight_scale.unique().tolist()) <= {
        *scale.unique().tolist(),
        1,
    }
    assert not hasattr(module, "lowbit") and "weight_zero_point" not in module._parameters
    values = dequantize_blocks(module.weight, module.weight_scale, bits, block[1])
    assert torch.equal(values, module.values(torch.float32))


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_gradients_are_those_of_masked_dense_autograd(architecture, sparse):
    made = model(architecture, **DIRECT)
    _, module = next(iter(masked_modules(made)))
    generator = torch.Generator().manual_seed(0)
    module.mask = torch.rand(module.layout.grid, generator=generator) < 0.4
    module.clear()
    module.controlled, module.sparse_compute = True, sparse
    module.train()
    x = torch.randn(2, 5, module.layout.in_features, generator=generator, requires_grad=True)
    target = torch.randn(2, 5, module.layout.out_features, generator=generator)
    (module(x) * target).sum().backward()
    weight, own = module.oriented().requires_grad_(), x.detach().clone().requires_grad_()
    elementwise = module.mask.repeat_interleave(8, 0).repeat_interleave(8, 1)
    (nn.functional.linear(own, weight * elementwise, module.bias) * target).sum().backward()
    gradient = module.weight.grad.t() if module.layout.transposed else module.weight.grad
    torch.testing.assert_close(gradient, weight.grad, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(x.grad, own.grad, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "step"), [(DIRECT, 6), (LEARNED, 9), (FLOAT_BLOCKS, 6)], ids=["codes", "learned-scales", "float-blocks"]
)
def test_resume(fields, step, tmp_path):
    given = {"save_strategy": "steps", "save_steps": step}
    whole, first = run(tmp_path / "whole", fields, direct={"state_bits": 8}, **given)
    resumed, second = run(tmp_path / "resumed", fields, direct={"state_bits": 8},
                          resume=str(tmp_path / "whole" / f"checkpoint-{step}"), **given)  # fmt: skip
    assert different(snapshot(whole), snapshot(resumed)) == []
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (first, second)]
    assert losses[0] == losses[1]


def test_a_checkpoint_of_training(tmp_path):
    """It says what it is, loads as it is, resumes, and is dense on request."""
    whole, _ = run(tmp_path / "whole", save_strategy="steps", save_steps=6)
    checkpoint = tmp_path / "whole" / "checkpoint-6"
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    name, module = next(iter(masked_modules(loaded)))
    layout = loaded.config.quantization_config.layouts[name]
    assert isinstance(module, MaskedCodes) and layout.form == "codes" and 0 < layout.sparsity < 0.75
    assert layout.sparsity == module.measured_sparsity and module.target == 0.75
    with pytest.raises(ValueError, match="goes on as it was begun"):
        AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=lb.BlastConfig(0.75, 8))
    dense = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=lb.BlastConfig(dequantize=True))
    assert type(dense.get_submodule(name)) is nn.Linear and type(dense.model.layers[0].self_attn.q_proj) is nn.Linear
    assert torch.equal(dense.get_submodule(name).weight, module.dense_weight())
    report = str(lb.report(loaded))
    assert "trained as dense codes" in report and "being pruned to 75.0%" in report
    assert lb.report(loaded).total_bytes == loaded.get_memory_footprint(return_buffers=False)
    train(tmp_path / "resumed", loaded, None, str(checkpoint), watchers=[callback(), lb.DQTCallback()])
    assert different(snapshot(whole), snapshot(loaded)) == []


def test_from_pretrained(tmp_path):
    BY_ID["llama"].build().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=lb.BlastConfig(sparsity=0.75, block_size=8, **DIRECT)
    )
    assert different(snapshot(model(**DIRECT)), snapshot(loaded)) == []


def test_codes_alone(tmp_path):
    """`rest` may leave every other layer float."""
    rest = lb.DQTConfig(8, modules_to_not_convert=["self_attn"])
    made = model(bits=8, rest=rest)
    assert {type(m) for m in made.model.layers[0].self_attn.children()} == {nn.Linear}
    train(tmp_path, made, None, watchers=[callback(), lb.DQTCallback()])
    assert made.config.quantization_config.rest is None
    made.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert different(snapshot(made), snapshot(again)) == []


def test_freeze_packs_the_codes(tmp_path):
    made, _ = run(tmp_path, options={"pack": False})
    before = {name: module.dense_weight() for name, module in masked_modules(made)}
    assert before
    lb.freeze(made)
    assert all(torch.equal(made.get_submodule(name).dense_weight(), dense) for name, dense in before.items())
    assert not any(isinstance(module, MaskedCodes) for module in made.modules())


def test_one_of_the_callbacks_alone_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="direct updates only: add `hf_lowbit.DQTCallback"):
        train(tmp_path, model(**DIRECT), callback())
    with pytest.raises(RuntimeError, match="nothing prunes it.*BlastCallback"):
        train(tmp_path, model(**DIRECT), None, watchers=[lb.DQTCallback()])


def test_a_loop_of_ones_own():
    """`BlockPruner` around `DQTOptimizer`."""
    made = model(**DIRECT).train()
    optimizer = lb.DQTOptimizer(made, lr=3e-3)
    pruner = BlockPruner(made, Schedule(6, 1))
    pruner.attach()
    inputs = BY_ID["llama"].inputs
    for step in range(1, 7):
        pruner.before_step(step)
        made(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
        pruner.after_step(step, optimizer)
        optimizer.zero_grad()
    assert {module.measured_sparsity for _, module in masked_modules(made)} == {0.75}


def test_not_a_number_is_refused_by_name():
    made = BY_ID["llama"].build()
    with torch.no_grad():
        made.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="model.layers.1.mlp.up_proj"):
        lb.quantize(made, lb.BlastConfig(0.75, 8, **DIRECT))
