"""The "gemma" layers of transformers, read with nothing else installed."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_lowbit as lb
from tests.exports.compare import IDS, dense_weights, logits


@pytest.mark.parametrize("bits", ["ternary", 2, 4, 8])
def test_float32_bit_for_bit(make, tmp_path, bits):
    model = make(bits=bits, group_size=None, symmetric=True, activations="float")
    assert lb.export(model, tmp_path / "out", "gemma").exact
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, weight in dense_weights(model).items():
        assert torch.equal(read.get_submodule(name)._dequantize_weights(torch.float32), weight)
    assert torch.equal(logits(read), logits(model.dequantize()))


def test_bfloat16_is_close_and_said_to_be(make, tmp_path):
    model = make(torch.bfloat16, bits=8, group_size=None)
    result = lb.export(model, tmp_path / "out", "gemma")
    assert not result.exact and "dtype=torch.float32" in str(result)
    # the scales in the file keep all their digits
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, weight in dense_weights(model).items():
        assert torch.equal(read.get_submodule(name)._dequantize_weights(torch.float32), weight)


def test_widths_may_differ_between_modules(make, tmp_path):
    modules = {"re:.*mlp.*": lb.Scheme(2, None, True), "re:.*self_attn.*": lb.Scheme(8, None, True)}
    model = make(modules=modules)
    lb.export(model, tmp_path / "out", "gemma")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(read), logits(model.dequantize()))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_embeddings_and_heads(tmp_path, tied):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    dense = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=96, tie_word_embeddings=tied)).eval()
    modules = {"re:.*(embed_tokens|lm_head)": lb.Scheme(8, None, True), "re:.*layers.*": lb.Scheme(4, None, True)}
    model = lb.quantize(dense, lb.LowBitConfig(modules=modules))
    lb.export(model, tmp_path / "out", "gemma")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(read, input_ids=IDS), logits(model.dequantize(), input_ids=IDS))


def test_the_rest_stays_dense(make, tmp_path):
    model = make(bits=4, group_size=None, modules_to_not_convert=["re:.*k_proj"])
    lb.export(model, tmp_path / "out", "gemma")
    kept = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert sorted(kept) == ["lm_head", "model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.k_proj"]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(read), logits(model.dequantize()))


@pytest.mark.parametrize(
    "wishes, sentence",
    [
        ({"bits": 4, "group_size": 32}, "quantize with `group_size=None`"),
        ({"bits": 3, "group_size": None, "symmetric": True}, "quantize with `bits` 2 or 4"),
        ({"bits": 4, "group_size": None, "symmetric": False}, "quantize with `symmetric=True`"),
    ],
    ids=["groups", "3-bit", "zero-points"],
)
def test_refusals_name_module_scheme_and_remedy(make, tmp_path, wishes, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        lb.export(make(**wishes), tmp_path / "out", "gemma")
    assert "`model.layers.0.self_attn.q_proj` and 13 more (Scheme(" in str(caught.value)


def test_gpt2_s_conv1d_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    dense = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=32))
    model = lb.quantize(dense, lb.LowBitConfig(bits=4, group_size=None))
    with pytest.raises(ValueError, match="a conv1d is neither a linear layer nor an embedding"):
        lb.export(model, tmp_path / "out", "gemma")
