"""Live blocks of low bits, and low-bit layers beside them: rounded when training has ended, smaller on disk, reloaded
bit for bit."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.functional.block_codes import quantize_blocks
from hf_lowbit.nn.block_sparse import BlockModule
from hf_lowbit.nn.packed import LowBitModule
from hf_lowbit.nn.sparsify import sparse_modules
from tests.quantizers.architectures import BY_ID
from tests.quantizers.test_sparse import pruned
from tests.sparsity.runs import callback, model, train


BITS = [8, 4, "ternary"]
# relative error of weights drawn from a normal distribution, rounded with a scale for each row of eight
ERRORS = {8: 0.02, 4: 0.15, "ternary": 0.7}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("balance", ["row", "none"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5-gated"])
def test_save_and_reload(architecture, balance, bits, tmp_path):
    zoo, made = BY_ID[architecture], pruned(architecture, balance=balance, bits=bits)
    floats = {name: module.dense_weight() for name, module in sparse_modules(made)}
    lb.freeze(made)
    for name, module in sparse_modules(made):
        assert isinstance(module, BlockModule) and module.weight.dtype == torch.int8
        assert not module.weight.requires_grad and module.weight_scale.dtype == torch.bfloat16
        dense, wanted = module.dense_weight(), floats[name]
        assert ((wanted == 0) <= (dense == 0)).all()
        assert (dense - wanted).norm() < ERRORS[bits] * wanted.norm()
    expected = zoo(made)
    made.save_pretrained(tmp_path)
    again = zoo.auto.from_pretrained(tmp_path)
    assert torch.equal(zoo(again), expected)
    assert again.config.quantization_config == made.config.quantization_config
    assert again.num_parameters() == zoo.build().num_parameters()
    for twin in (copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert torch.equal(zoo(twin), expected)
    again.dequantize()
    assert not list(sparse_modules(again))
    torch.testing.assert_close(zoo(again), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", BITS)
def test_bytes(bits, tmp_path):
    made = lb.freeze(pruned(bits=bits, block_size=16))
    made.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    width = {8: 8, 4: 4, "ternary": 2}[bits]
    for name, module in sparse_modules(made):
        weights = module.layout.live_blocks * 16 * 16
        codes, scales = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
        assert codes.nbytes == weights * width / 8 and scales.nbytes == 2 * weights / 16
        own = codes.nbytes + scales.nbytes + stored[f"{name}.weight_col_indices"].nbytes
        assert own == module.stored_bytes()
    rows = [m for m in lb.report(made).modules if m.sparsity is not None]
    assert {m.block_bits for m in rows} == {bits} and {m.block for m in rows} == {(16, 16)}
    assert sum(m.bytes for m in rows) == sum(m.stored_bytes() for _, m in sparse_modules(made))
    assert f"the live ones {bits if bits == 'ternary' else f'{bits}-bit'}" in str(lb.report(made))


def test_blocks_of_codes_are_those_of_the_rows():
    values = torch.randn(3, 2, 8, 16)
    stored, scale = quantize_blocks(values, 8)
    assert stored.shape == values.shape and scale.shape == (3, 2, 8)
    one, other = quantize_blocks(values[1, 1], 8)
    assert torch.equal(stored[1, 1], one) and torch.equal(scale[1, 1], other)
    with pytest.raises(ValueError, match="NaN"):
        quantize_blocks(torch.full((1, 8, 8), float("nan")), 4)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "llama-tied", "mixtral"])
def test_the_rest_is_low_bit_too(architecture, bits, tmp_path):
    zoo = BY_ID[architecture]
    fields = {"bits": bits, "rest": lb.LowBitConfig(bits=8, group_size=None)}
    if architecture == "mixtral":
        fields["targets"] = "attention"
        fields["modules_to_not_convert"] = ["experts"]
    made = lb.freeze(pruned(architecture, **fields))
    low = {name for name, module in made.named_modules() if isinstance(module, LowBitModule)}
    assert low and low.isdisjoint(name for name, _ in sparse_modules(made))
    expected = zoo(made)
    made.save_pretrained(tmp_path)
    again = zoo.auto.from_pretrained(tmp_path)
    assert torch.equal(zoo(again), expected)
    assert low == {name for name, module in again.named_modules() if isinstance(module, LowBitModule)}
    assert again.config.quantization_config == made.config.quantization_config
    assert again.num_parameters() == zoo.build().num_parameters()
    report = lb.report(again)
    assert report.total_bytes == sum(p.nbytes for p in again.parameters())
    assert sum(m.parameters for m in report.modules) == report.total_parameters
    base = type(zoo.build().base_model).from_pretrained(tmp_path)
    assert len(list(sparse_modules(base))) == len(list(sparse_modules(made)))
    again.dequantize()
    assert not any(isinstance(m, (BlockModule, LowBitModule)) for m in again.modules())
    torch.testing.assert_close(zoo(again), expected, atol=1e-4, rtol=1e-4)
    dense = zoo.auto.from_pretrained(tmp_path, quantization_config=lb.BlastConfig(dequantize=True))
    assert not hasattr(dense.config, "quantization_config")
    torch.testing.assert_close(zoo(dense), expected, atol=1e-4, rtol=1e-4)


def test_training_ends_in_low_bits(tmp_path, dense_folder):
    made = AutoModelForCausalLM.from_pretrained(
        dense_folder("llama"),
        quantization_config=lb.BlastConfig(0.75, 8, bits=8, rest={"bits": 8, "group_size": None}),
    )
    assert all(p.is_floating_point() for p in made.parameters())
    trainer = train(tmp_path / "run", made, callback(), save_strategy="steps", save_steps=10)
    assert {m.layout.bits for _, m in sparse_modules(made)} == {8}
    assert {m.measured_sparsity for _, m in sparse_modules(made)} == {0.75}
    loss = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.save_model(tmp_path / "end")
    zoo = BY_ID["llama"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    assert torch.equal(zoo(again), zoo(made)) and loss < 10
    # a checkpoint from the middle is still to be pruned, and knows what comes after
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-10")
    assert {type(m).__name__ for _, m in sparse_modules(half)} == {"MaskedLinear"}
    assert half.config.quantization_config.bits == 8 and half.config.quantization_config.rest.bits == 8
    assert {m.layout.bits for _, m in sparse_modules(lb.freeze(half))} == {8}
    assert any(isinstance(m, LowBitModule) for m in half.modules())


def test_rounded_blocks_are_neither_trained_nor_pruned_further(tmp_path):
    made = lb.freeze(pruned(bits=8))
    with pytest.raises(ValueError, match="purely quantized|fine-tuning|training"):
        train(tmp_path, made, None, max_steps=1)
    with pytest.raises(ValueError, match="8 bits: blocks of codes can't be pruned further"):
        lb.quantize(made, lb.BlastConfig(0.9, 8))
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`bits`=8, and blocks of codes"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=lb.BlastConfig(0.9, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype, tmp_path):
    lb.freeze(pruned(bits=4, rest={"bits": 4, "group_size": 32})).save_pretrained(tmp_path)
    made = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    module = next(module for _, module in sparse_modules(made))
    assert module.weight_scale.dtype == torch.bfloat16 and made.dtype == dtype
    assert torch.isfinite(BY_ID["llama"](made).float()).all()
    nn.Module.to(made, torch.float32)
    assert module.weight_scale.dtype == torch.bfloat16 and module.weight.dtype == torch.int8


def test_patterns_of_the_rest_are_checked_before_training():
    with pytest.raises(ValueError, match="`modules_to_not_convert` has 'no_such'"):
        model(rest={"bits": 8, "modules_to_not_convert": ["no_such"]})


def test_damaged_scales_are_refused(tmp_path):
    from safetensors.torch import save_file

    lb.freeze(pruned(bits=8)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("up_proj.weight_scale"))
    tensors[name][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="scale that is not a positive number"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
