"""compressed-tensors, read by transformers with that package: the very weights and logits."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig

import hf_lowbit as lb
from hf_lowbit.exports.compressed_tensors import pack_words
from tests.exports.compare import IDS, dense_weights, logits


pytest.importorskip("compressed_tensors")

SCHEMES = [
    pytest.param(*scheme, id=f"{scheme[0]}-{scheme[1]}-{'symmetric' if scheme[2] else 'zero-points'}")
    for scheme in [
        ("ternary", 32, True), ("ternary", "tensor", True), (2, 32, True), (2, 16, False), (3, 32, True),
        (3, None, False), (4, 32, True), (4, 16, False), (4, None, True), (8, 32, True), (8, None, True),
    ]
]  # fmt: skip


@given(st.sampled_from([2, 4, 8]), st.integers(1, 5), st.integers(1, 70), st.integers(0, 99))
def test_words_are_the_package_s_own(bits, rows, columns, seed):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    low, high = -(1 << bits - 1), 1 << bits - 1
    codes = torch.randint(low, high, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    assert torch.equal(pack_words(codes, bits), pack_to_int32(codes, bits))


@pytest.mark.parametrize("bits, group_size, symmetric", SCHEMES)
def test_read_back_bit_for_bit(make, tmp_path, bits, group_size, symmetric):
    model = make(bits=bits, group_size=group_size, symmetric=symmetric, activations="float")
    result = lb.export(model, tmp_path / "out", "compressed-tensors")
    assert result.exact
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    weights = dense_weights(model)
    found = logits(read)
    # the reader decompresses at its first forward pass
    assert all(torch.equal(read.get_submodule(name).weight, weight) for name, weight in weights.items())
    assert len(weights) == 14
    assert torch.equal(found, logits(model.dequantize()))


@pytest.mark.parametrize("bits, symmetric", [(4, True), (3, False)], ids=["4-bit", "3-bit-zero-points"])
def test_bfloat16_in_groups_bit_for_bit(make, tmp_path, bits, symmetric):
    model = make(torch.bfloat16, bits=bits, group_size=32, symmetric=symmetric)
    assert lb.export(model, tmp_path / "out", "compressed-tensors").exact
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert read.dtype == torch.bfloat16
    assert torch.equal(logits(read), logits(model.dequantize()))


def test_bfloat16_with_one_scale_a_channel_is_close_and_said_to_be(make, tmp_path):
    model = make(torch.bfloat16, bits=4, group_size=None)
    result = lb.export(model, tmp_path / "out", "compressed-tensors")
    assert set(result.rounded) == set(dense_weights(model))
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    logits(read)
    for name, weight in dense_weights(model).items():
        # a scale of 8 significant bits, and the product rounded to 8
        assert torch.allclose(read.get_submodule(name).weight.float(), weight, rtol=2**-7, atol=0)


def test_schemes_may_differ_between_modules(make, tmp_path):
    modules = {"re:.*mlp.*": lb.Scheme(3, 16), "re:.*self_attn.*": lb.Scheme(8, None, True)}
    model = make(modules=modules)
    result = lb.export(model, tmp_path / "out", "compressed-tensors")
    assert result.exact and len(set(result.stored.values())) == 2
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(read), logits(model.dequantize()))


def test_an_encoder_with_a_dense_head_and_biases(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    dense = AutoModelForSequenceClassification.from_config(BertConfig(**sizes, vocab_size=64)).eval()
    model = lb.quantize(dense, lb.LowBitConfig(bits=4, group_size=32))
    lb.export(model, tmp_path / "out", "compressed-tensors")
    assert "classifier" in json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["ignore"]
    read = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert torch.equal(logits(read, input_ids=IDS), logits(model.dequantize(), input_ids=IDS))


@pytest.mark.parametrize(
    "wishes, sentence",
    [
        ({"bits": 4, "group_size": 40}, r"groups of 40 do not divide its 64 inputs; .* one of \[64, 32, 16, 8\]"),
        ({"bits": 8, "group_size": 32, "symmetric": False}, "8 bits with zero points need 9 without"),
        ({"modules": {"model.embed_tokens": lb.Scheme(8, 32)}}, "a embedding is not a linear layer"),
    ],
    ids=["group-size", "8-bit-zero-points", "embedding"],
)
def test_refusals(make, tmp_path, wishes, sentence):
    with pytest.raises(ValueError, match=sentence):
        lb.export(make(**wishes), tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_smollm2_bit_for_bit(smollm2, tmp_path):
    config = lb.LowBitConfig(bits=4, group_size=64)
    model = AutoModelForCausalLM.from_pretrained(smollm2, quantization_config=config)
    assert lb.export(model, tmp_path / "out", "compressed-tensors").exact
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(read), logits(model.dequantize()))
