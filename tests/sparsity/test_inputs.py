"""Layers that are being pruned are linear layers for every input and every block; what trains them survives odd ends.

The same list for weights that are floats and for weights that are codes: 0-D to 4-D batches, empty ones, strided ones,
bias, rows without a live block, blocks of 8 to 128 on either side, sizes that blocks do not divide.
"""

import logging as python_logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.pytorch_utils import Conv1D

import hf_lowbit as lb
from hf_lowbit.configs.blast import BlockLayout
from hf_lowbit.nn.block_sparse import BlockModule
from hf_lowbit.nn.masked_codes import MaskedCodes
from hf_lowbit.nn.sparsify import become_codes, become_masked, masked_modules, pack_blocks, sparse_modules
from hf_lowbit.nn.trainable import Training
from hf_lowbit.sparsity.pruner import BlockPruner
from hf_lowbit.sparsity.schedule import Schedule
from tests.quantizers.architectures import BY_ID
from tests.sparsity.runs import DIRECT, callback, model, train


# another order of summation
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
BLOCKS = [(8, 8), (8, 128), (128, 8), (24, 40), (9, 13), (32, 128)]


def masked(bits=None, block=(8, 16), shape=(48, 64), bias=True, transposed=False, dead_row=False):
    """A layer with every other block dead, under training."""
    torch.manual_seed(0)
    module = Conv1D(shape[0], shape[1]) if transposed else nn.Linear(shape[1], shape[0], bias=bias)
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    stored = shape[::-1] if transposed else shape
    layout = BlockLayout(stored, block, "dense", "none", grid[0] * grid[1], transposed, bits)
    become_masked(module, "conv1d" if transposed else "linear", layout, 0.5)
    if bits is not None:
        become_codes(module, bits, None, Training(), torch.float32)
    # a checkerboard, whose last block row may have one block less
    mask = (torch.arange(grid[0])[:, None] + torch.arange(grid[1])) % 2 == 0
    if dead_row:
        mask[0] = False
    module.mask, module.controlled = mask, True
    module.clear()
    return module.train()


def reference(module):
    """The dense layer that a masked one stands for."""
    rows, columns = module.layout.out_features, module.layout.in_features
    dense = nn.Linear(columns, rows, bias=module.bias is not None)
    dense.weight.data.copy_(module.oriented().detach())
    if module.bias is not None:
        dense.bias.data.copy_(module.bias.data)
    return dense


def elementwise(module):
    rows = module.mask.repeat_interleave(module.layout.block[0], 0)[: module.layout.out_features]
    return rows.repeat_interleave(module.layout.block[1], 1)[:, : module.layout.in_features]


@pytest.mark.parametrize("bits", [None, 8, "ternary"], ids=str)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("shape", [(64,), (0, 64), (5, 64), (2, 3, 64), (2, 3, 4, 64), (0, 3, 64), "strided"], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
def test_shapes_of_inputs(bits, sparse, shape, transposed):
    module = masked(bits, transposed=transposed)
    module.sparse_compute = sparse
    x = torch.randn(64, 6, 4).permute(2, 1, 0)[:, ::2] if shape == "strided" else torch.randn(shape)
    dense, own = reference(module), x.clone().requires_grad_()
    x.requires_grad_()
    y, expected = module(x), dense(own)
    torch.testing.assert_close(y, expected, **TOLERANCE)
    factor = torch.randn(y.shape)
    (y * factor).sum().backward()
    (expected * factor).sum().backward()
    torch.testing.assert_close(x.grad, own.grad, **TOLERANCE)
    gradient = module.weight.grad.t() if transposed else module.weight.grad
    torch.testing.assert_close(gradient, dense.weight.grad * elementwise(module), **TOLERANCE)
    torch.testing.assert_close(module.bias.grad, dense.bias.grad, **TOLERANCE)


@pytest.mark.parametrize("bits", [None, 8, 4], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(128, 128), (130, 133)], ids=["whole", "odd"])
def test_blocks_that_are_rectangular_or_do_not_divide(bits, block, shape):
    module = masked(bits, block, shape, bias=False)
    dense, x = reference(module), torch.randn(3, shape[1])
    expected = dense(x)
    for sparse in (False, True):
        module.sparse_compute = sparse
        torch.testing.assert_close(module(x), expected, **TOLERANCE)
    weight = module.oriented().detach().clone()
    pack_blocks(module)
    if bits is None or bits == 8:
        # 4 bits too, but for floats they are rounded
        torch.testing.assert_close(module.dense_weight(), weight, atol=0, rtol=0)
    torch.testing.assert_close(module.eval()(x), nn.functional.linear(x, module.dense_weight()), **TOLERANCE)


@pytest.mark.parametrize("bits", [None, 8], ids=str)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_a_row_without_a_live_block_gives_the_bias(bits, sparse):
    module = masked(bits, dead_row=True)
    module.sparse_compute = sparse
    x = torch.randn(5, 64, requires_grad=True)
    y = module(x)
    assert torch.equal(y[:, :8], module.bias[:8].expand(5, 8))
    y.square().sum().backward()
    assert (module.weight.grad[:8] == 0).all() and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("fields", [{}, DIRECT], ids=["floats", "codes"])
def test_a_weight_of_zeros_starts_alive(fields, tmp_path):
    """A layer that is zero at the start (as some are initialized) has lost no block: it has to be able to learn."""
    dense = BY_ID["llama"].build()
    dense.model.layers[0].mlp.down_proj.weight.data.zero_()
    dense.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=lb.BlastConfig(0.75, 8, **fields))
    made = lb.quantize(dense, lb.BlastConfig(0.75, 8, **fields))
    for one in (loaded, made):
        assert one.model.layers[0].mlp.down_proj.measured_sparsity == 0


@pytest.mark.parametrize("architecture", ["gpt2", "bert-masked-lm", "bart", "t5-gated", "opt"])
def test_codes_of_architectures(architecture, tmp_path):
    """Conv1D, encoders and pairs: chosen, trained, packed, saved and reloaded."""
    zoo, made = BY_ID[architecture], model(architecture, **DIRECT)
    names = {name for name, module in sparse_modules(made) if isinstance(module, MaskedCodes)}
    assert names and names == {name for name, _ in masked_modules(made)}
    optimizer, pruner = lb.DQTOptimizer(made.train(), lr=1e-3), BlockPruner(made, Schedule(3, 1), grow="budget")
    pruner.attach()
    for step in range(1, 4):
        pruner.before_step(step)
        getattr(made(**zoo.inputs), zoo.output).square().mean().backward()
        optimizer.step()
        pruner.after_step(step, optimizer)
        optimizer.zero_grad()
    pruner.release()
    before = {name: module.dense_weight() for name, module in masked_modules(made)}
    lb.freeze(made)
    assert all(torch.equal(made.get_submodule(name).dense_weight(), weight) for name, weight in before.items())
    made.save_pretrained(tmp_path)
    again = zoo.auto.from_pretrained(tmp_path)
    assert torch.equal(zoo(again), zoo(made.eval()))
    assert {n for n, m in sparse_modules(again) if isinstance(m, BlockModule) and m.layout.bits == 8} == names


def test_attention_on_request(tmp_path):
    made = model(targets="attention", **DIRECT)
    assert all("self_attn" in name for name, _ in masked_modules(made))
    train(tmp_path, made, callback(), watchers=[lb.DQTCallback()], max_steps=8)
    assert {module.measured_sparsity for _, module in sparse_modules(made)} == {0.75}


def test_a_schedule_longer_than_training(tmp_path, caplog):
    made = model(**DIRECT)
    with caplog.at_level(python_logging.WARNING):
        train(tmp_path, made, callback(total_steps=1000), watchers=[lb.DQTCallback()], max_steps=6)
    assert "pruned from" in caplog.text and {m.measured_sparsity for _, m in sparse_modules(made)} == {0.75}


def test_training_that_stops_early(tmp_path, caplog):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 7

    made = model(**DIRECT)
    with caplog.at_level(python_logging.WARNING):
        train(tmp_path, made, callback(), watchers=[lb.DQTCallback(), Stop()])
    measured = made.model.layers[0].mlp.up_proj.measured_sparsity
    assert "training stopped at step 7" in caplog.text and 0 < measured < 0.75
    made.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.model.layers[0].mlp.up_proj.measured_sparsity == measured


def test_a_model_that_was_never_pruned_says_so(tmp_path):
    """A high sparsity that nobody trained towards: the file is dense, and the config says 0."""
    made = model(sparsity=0.75)
    made.save_pretrained(tmp_path)
    layouts = AutoModelForCausalLM.from_pretrained(tmp_path).config.quantization_config.layouts
    assert {layout.sparsity for layout in layouts.values()} == {0.0}
    assert {layout.form for layout in layouts.values()} == {"dense"}
    assert "0.0% of 8x8 blocks dead, being pruned to 75.0%" in str(lb.report(made))


@pytest.mark.parametrize(
    "options",
    [{"grow_fraction": "x"}, {"distill_weight": None}, {"pack": "no"}, {"reset_optimizer_state": 0}],
    ids=str,
)
def test_options_of_a_wrong_type(options):
    with pytest.raises(TypeError, match=f"`{next(iter(options))}`=.* must be"):
        lb.BlastCallback(**options)


def test_keys_of_overrides_are_names():
    with pytest.raises(TypeError, match="`overrides` has the key 5"):
        lb.BlastConfig(overrides={5: {"sparsity": 0.5}})
