"""Merging adapters into low-bit layers: exact when they become dense, on their grid when they stay, undone bit for
bit, and never dropped."""

import copy
import warnings

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model

import hf_lowbit as lb
from hf_lowbit.nn.packed import LowBitModule
from tests.quantizers.architectures import BY_ID


# sums of float32 in another order, relative to what the adapter changes
CLOSE = 1e-4


def lowbit(name="llama", bits=8, **fields):
    config = lb.LowBitConfig(bits=bits, group_size=32, activations="float", **fields)
    return lb.quantize(BY_ID[name].build(), config)


def adapted(name="llama", bits=8, method=LoraConfig, base=None, **fields):
    """A low-bit model with an adapter that changes it."""
    torch.manual_seed(1)
    fields = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **fields}
    with warnings.catch_warnings():
        # PEFT sets fan_in_fan_out for Conv1D by itself, and says so
        warnings.simplefilter("ignore")
        return get_peft_model(base or lowbit(name, bits), method(**fields))


def packed_state(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype == torch.int8 or "_scale" in n}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


def assert_close(got, expected, base):
    assert (expected - base).norm() > 0.1
    assert (got - expected).norm() <= CLOSE * (expected - base).norm()


@pytest.mark.parametrize("bits", ["ternary", 3, 4, 8])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("safe", [True, False], ids=["safe", "unsafe"])
def test_merge_and_unload_keeps_the_adapter(name, bits, safe):
    run = BY_ID[name]
    base = lowbit(name, bits)
    without = run(base)
    model = adapted(name, bits, base=base)
    with_adapter = run(model)
    merged = model.merge_and_unload(safe_merge=safe)
    assert_close(run(merged), with_adapter, without)
    assert not any(isinstance(module, LowBitModule) for module in merged.modules())


@pytest.mark.parametrize("mode", ["dequantize", "requantize"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_unmerge_brings_back_the_very_codes(name, mode):
    model = adapted(name, 3)
    before, expected = packed_state(model), BY_ID[name](model)
    with lb.merge_as(mode):
        model.merge_adapter(safe_merge=True)
    assert not torch.equal(BY_ID[name](model), expected)
    model.unmerge_adapter()
    assert_same(packed_state(model), before)
    assert torch.equal(BY_ID[name](model), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_requantized_model_is_low_bit_saved_and_read(name, tmp_path):
    model = adapted(name, 8)
    expected = BY_ID[name](model)
    with lb.merge_as("requantize") as losses:
        merged = model.merge_and_unload(safe_merge=True)
    layers = [module for module in merged.modules() if isinstance(module, LowBitModule)]
    assert len(losses) == len(layers) > 0
    # half a step of 255 at most, and most weights lie well inside the range
    assert all(0 < loss.of_weight < 0.01 and 0 < loss.of_update < 0.05 for loss in losses)
    merged.save_pretrained(tmp_path)
    again = BY_ID[name].auto.from_pretrained(tmp_path)
    assert torch.equal(BY_ID[name](again), BY_ID[name](merged))
    assert (BY_ID[name](again) - expected).norm() < 0.05 * expected.norm()


def test_requantizing_an_adapter_that_does_nothing_changes_no_code():
    model = adapted(bits=2, init_lora_weights=True)
    before = packed_state(model)
    with lb.merge_as("requantize") as losses:
        model.merge_adapter()
    assert_same(packed_state(model), before)
    assert all(loss.of_weight == loss.of_update == 0 for loss in losses)


def test_partly_merged_model_is_saved_and_read(tmp_path):
    model = adapted(bits=4, target_modules=["q_proj"])
    merged = model.merge_and_unload(safe_merge=True)
    merged.save_pretrained(tmp_path)
    again = BY_ID["llama"].auto.from_pretrained(tmp_path)
    assert type(again.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert isinstance(again.model.layers[0].self_attn.k_proj, LowBitModule)
    assert torch.equal(BY_ID["llama"](again), BY_ID["llama"](merged))


def test_merged_model_is_an_ordinary_dense_one(tmp_path):
    merged = adapted(bits=8).merge_and_unload(safe_merge=True)
    merged.save_pretrained(tmp_path)
    again = BY_ID["llama"].auto.from_pretrained(tmp_path)
    assert getattr(again.config, "quantization_config", None) is None
    assert torch.equal(BY_ID["llama"](again), BY_ID["llama"](merged))


@pytest.mark.parametrize("mode", ["dequantize", "requantize"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_merged_one_after_the_other_equal_both_at_once(mode, dora):
    run = BY_ID["llama"]
    base = lowbit(bits=4)
    model = adapted(base=base, use_dora=dora)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, use_dora=dora))
    before = packed_state(model)
    with lb.merge_as(mode):
        model.merge_adapter(["default", "second"])
        at_once = run(model)
        model.unmerge_adapter()
        assert_same(packed_state(model), before)
        model.merge_adapter(["default"])
        model.merge_adapter(["second"])
    assert torch.equal(run(model), at_once)
    model.unmerge_adapter()
    assert_same(packed_state(model), before)


@pytest.mark.parametrize("safe", [True, False], ids=["safe", "unsafe"])
@pytest.mark.parametrize("mode", ["dequantize", "requantize"])
def test_broken_adapter_is_refused_and_nothing_changes(mode, safe):
    model = adapted(bits=8, target_modules=["q_proj"])
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    before = packed_state(model)
    layer.lora_B["default"].weight.data[0, 0] = float("nan")
    with lb.merge_as(mode), pytest.raises(ValueError, match="broken"):
        model.merge_adapter(safe_merge=safe)
    assert layer.merged_adapters == []
    assert_same(packed_state(model), before)


def test_biases_of_adapters_are_merged_and_taken_back():
    model = adapted("qwen2", 8, target_modules=["q_proj"], lora_bias=True)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].bias.normal_()
    bias, expected = layer.base_layer.bias.clone(), BY_ID["qwen2"](model)
    model.merge_adapter(safe_merge=True)
    assert not torch.equal(layer.base_layer.bias, bias)
    assert (BY_ID["qwen2"](model) - expected).norm() <= CLOSE * expected.norm()
    model.unmerge_adapter()
    assert torch.equal(layer.base_layer.bias, bias)


def test_merged_weight_is_rounded_once():
    base = lb.quantize(BY_ID["llama"].build().to(torch.bfloat16), lb.LowBitConfig(bits=4, group_size=32))
    model = adapted(base=base, target_modules=["q_proj"])
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    exact = layer.base_layer.dense_weight() + layer.get_delta_weight("default")
    merged = model.merge_and_unload().model.layers[0].self_attn.q_proj.weight
    assert torch.equal(merged, exact.to(torch.bfloat16))


METHODS = {
    "dora": lambda: LoraConfig(r=4, target_modules=["q_proj", "up_proj"], use_dora=True, init_lora_weights=False),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=8, r=0, init_weights=False),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], r=8, init_weights=False),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, init_lora_weights=False),
}


@pytest.mark.parametrize("method", METHODS)
def test_method_equals_the_one_on_the_dequantized_model(method):
    """The same adapter over the dense form gives the same outputs and gradients, and merges to the same."""
    run = BY_ID["llama"]
    base = lowbit(bits=4)
    dense, without = copy.deepcopy(base).dequantize(), run(base)
    torch.manual_seed(2)
    model = get_peft_model(base, METHODS[method]())
    torch.manual_seed(2)
    reference = get_peft_model(dense, METHODS[method]())
    assert_close(run(model), run(reference), without)
    for one in (model, reference):
        one(**run.inputs, labels=run.inputs["input_ids"]).loss.backward()
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        assert (model.get_parameter(name).grad - gradient).norm() <= 1e-3 * gradient.norm() + 1e-7, name
    before, expected = packed_state(model), run(model)
    model.merge_adapter(safe_merge=True)
    assert_close(run(model), expected, without)
    model.unmerge_adapter()
    assert_same(packed_state(model), before)
    assert_close(run(model.merge_and_unload()), expected, without)


def test_merge_as_refuses_other_words():
    with pytest.raises(ValueError, match='"dequantize" or "requantize"'), lb.merge_as("keep"):
        pass


def test_adapted_model_is_copied():
    model = adapted(bits=4)
    assert torch.equal(BY_ID["llama"](copy.deepcopy(model)), BY_ID["llama"](model))
