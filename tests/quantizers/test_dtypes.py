"""The dtype a model is loaded in, and moved to: codes and scales are the same in all of them."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import hf_lowbit as lb
from hf_lowbit.nn.packed import LowBitModule
from tests.quantizers.architectures import BY_ID, PAIR, TEXT


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TABLE = {"bits": 3, "group_size": 32, "modules": {"embed_tokens": lb.Scheme(8, None)}}
# 8-bit weights and half-precision sums, relative to the norm of the float32 output
CLOSE = {torch.float32: 0.03, torch.float16: 0.03, torch.bfloat16: 0.06}


def name(dtype):
    return str(dtype).removeprefix("torch.")


def packed_tensors(model):
    """Codes, scales and zero points of the whole model, by name."""
    return {
        f"{path}.{name}": tensor.clone()
        for path, module in model.named_modules()
        if isinstance(module, LowBitModule)
        for name, tensor in module.named_parameters(recurse=False)
        if name in module.lowbit or name in module.companions()
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert other[key].dtype == tensor.dtype and torch.equal(other[key], tensor), key


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_a_low_bit_checkpoint_loads_in_any_dtype(lowbit_folder, dtype):
    folder = lowbit_folder("llama", **TABLE)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert model.dtype == dtype and model.lm_head.weight.dtype == dtype
    assert_same(packed_tensors(model), packed_tensors(reference))
    expected, logits = BY_ID["llama"](reference), BY_ID["llama"](model)
    assert logits.dtype == dtype
    assert (logits - expected).norm() <= CLOSE[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_a_dense_checkpoint_is_quantized_in_any_dtype(dense_folder, dtype, tmp_path):
    config = lb.LowBitConfig(bits=8, group_size=32)
    dense = BY_ID["qwen2"].build()
    model = AutoModelForCausalLM.from_pretrained(dense_folder("qwen2"), quantization_config=config, dtype=dtype)
    assert model.dtype == dtype
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {dtype}
    expected, logits = BY_ID["qwen2"](dense), BY_ID["qwen2"](model)
    assert logits.dtype == dtype
    assert (logits - expected).norm() <= CLOSE[dtype] * expected.norm()
    model.save_pretrained(tmp_path)
    # what was saved decides when `dtype` is unset
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == dtype
    assert torch.equal(BY_ID["qwen2"](again), logits)


def test_dtype_unset_is_that_of_the_dense_checkpoint(tmp_path):
    BY_ID["llama"].build().to(torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=lb.LowBitConfig(group_size=32))
    assert model.dtype == torch.bfloat16
    assert BY_ID["llama"](model).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=name)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_moving_to_a_dtype_changes_no_code_and_no_scale(lowbit_folder, architecture, dtype):
    # per channel: scales in float32, which a cast to half precision would round
    architecture = BY_ID[architecture]
    model = architecture.auto.from_pretrained(lowbit_folder(architecture.id, bits=3, group_size=None))
    before, expected = packed_tensors(model), architecture(model)
    model.to(dtype)
    assert_same(before, packed_tensors(model))
    assert model.dtype == dtype
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {dtype}
    assert torch.isfinite(architecture(model)).all()
    model.to(torch.float32)
    assert_same(before, packed_tensors(model))
    if dtype == torch.float64:
        # nothing was rounded on the way
        assert torch.equal(architecture(model), expected)


def test_moved_model_is_saved_in_its_new_dtype(lowbit_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(lowbit_folder("llama", **TABLE)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert_same(model.state_dict(), again.state_dict())


def test_a_low_bit_table_follows_the_dtype(lowbit_folder):
    model = AutoModelForCausalLM.from_pretrained(lowbit_folder("llama", **TABLE))
    assert model.get_input_embeddings()(TEXT["input_ids"]).dtype == torch.float32
    model.to(torch.bfloat16)
    assert model.get_input_embeddings()(TEXT["input_ids"]).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("architecture", ["t5-relu", "t5-gated"])
def test_t5_keeps_wo_in_float32(dense_folder, architecture, dtype, tmp_path):
    """T5 overflows in float16 unless `wo` is float32, and looks at `wo.weight.dtype` to cast activations.

    Public reports: huggingface/transformers#36254, #21839 and #20287, dropbox/hqq#150.
    """
    architecture = BY_ID[architecture]
    expected = architecture(architecture.build())
    config = lb.LowBitConfig(bits=8, group_size=32)
    folder = dense_folder(architecture.id)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, quantization_config=config, dtype=dtype)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=dtype)
    for one in (model, reloaded):
        # float16 only: transformers lets bfloat16 models have it in bfloat16
        wo = {module.weight.dtype for path, module in one.named_modules() if path.endswith(".wo")}
        assert wo == {torch.bfloat16 if dtype == torch.bfloat16 else torch.float32}
        logits = architecture(one)
        assert torch.isfinite(logits).all()
        assert (logits - expected).norm() <= CLOSE[dtype] * expected.norm()
    assert torch.equal(architecture(model), architecture(reloaded))


def test_t5_feed_forward_survives_without_wo(dense_folder):
    """Every other layer skipped: activations still reach `wo` in its own dtype.

    Public reports: huggingface/transformers#36254, #21839 and #20287, dropbox/hqq#150.
    """
    config = lb.LowBitConfig(bits=8, group_size=32, modules_to_not_convert=["re:(q|k|v|o)"])
    folder = dense_folder("t5-relu")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, quantization_config=config, dtype=torch.float16)
    low = [path for path, module in model.named_modules() if isinstance(module, LowBitModule)]
    assert low and all(path.endswith(".wi") for path in low)
    assert torch.isfinite(model(**PAIR).logits).all()
