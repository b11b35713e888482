"""GGUF, decoded by gguf-py and loaded by transformers: the very weights, and the tokenizer."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_lowbit as lb
from hf_lowbit.exports import blocks
from tests.exports.compare import dense_weights, logits


gguf = pytest.importorskip("gguf")
TEXT = "It is a truth, universally acknowledged in 1813, that a single man's"


def codes(low, high, rows=3, columns=512):
    return torch.randint(low, high + 1, (rows, columns), generator=torch.Generator().manual_seed(0)).to(torch.int8)


def scales(block, rows=3, columns=512):
    return torch.rand(rows, columns // block, generator=torch.Generator().manual_seed(1)).add(0.5).half()


@pytest.mark.parametrize("name, low, high", [("Q4_0", -8, 7), ("Q8_0", -128, 127), ("TQ2_0", -1, 1)])
def test_blocks_decode_with_gguf_py(name, low, high):
    q, d = codes(low, high), scales(blocks.BLOCK[name])
    rows = getattr(blocks, name.lower())(q, d)
    found = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(found, (q * d.float().repeat_interleave(blocks.BLOCK[name], 1)).numpy())


def test_blocks_with_a_minimum_decode_with_gguf_py():
    q, d, m = codes(0, 15), scales(32), -scales(32)
    found = gguf.quants.dequantize(blocks.q4_1(q, d, m).numpy(), gguf.GGMLQuantizationType.Q4_1)
    expected = q * d.float().repeat_interleave(32, 1) + m.float().repeat_interleave(32, 1)
    assert np.array_equal(found, expected.numpy())


@pytest.fixture
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


def read(folder):
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)


@pytest.mark.parametrize("bits, form", [("ternary", "Q4_0"), (2, "Q4_0"), (3, "Q4_0"), (4, "Q4_0"), (8, "Q8_0")])
def test_symmetric_groups_bit_for_bit(make, tokenizer, tmp_path, bits, form):
    model = make(bits=bits, group_size=32, symmetric=True, activations="float")
    result = lb.export(model, tmp_path / "out", "gguf", tokenizer=tokenizer)
    assert result.exact and set(result.stored.values()) == {form}
    found = read(tmp_path / "out")
    assert all(torch.equal(found.get_submodule(name).weight, w) for name, w in dense_weights(model).items())
    assert torch.equal(logits(found), logits(model.dequantize()))


def test_zero_points_are_minima_rounded_to_float16(make, tokenizer, tmp_path):
    model = make(bits=3, group_size=32)
    result = lb.export(model, tmp_path / "out", "gguf", tokenizer=tokenizer)
    assert set(result.stored.values()) == {"Q4_1"}
    found = read(tmp_path / "out")
    for name, weight in dense_weights(model).items():
        # a minimum of up to 7 scales, in float16
        bound = 2**-11 * weight.abs().max()
        assert (found.get_submodule(name).weight - weight).abs().max() <= bound, name


def test_ternary_rows_of_256_take_two_bits(tokenizer, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    dense = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=384)).eval()
    model = lb.quantize(dense, lb.LowBitConfig(bits="ternary", group_size=256))
    result = lb.export(model, tmp_path / "out", "gguf", tokenizer=tokenizer)
    assert result.exact and set(result.stored.values()) == {"TQ2_0"}
    found = read(tmp_path / "out")
    assert all(torch.equal(found.get_submodule(name).weight, w) for name, w in dense_weights(model).items())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_embeddings_and_heads(tokenizer, tmp_path, tied):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    dense = LlamaForCausalLM(
        LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=384, tie_word_embeddings=tied)
    ).eval()
    modules = {"re:.*(embed_tokens|lm_head)": lb.Scheme(8, 32), "re:.*layers.*": lb.Scheme(4, 32)}
    model = lb.quantize(dense, lb.LowBitConfig(modules=modules))
    lb.export(model, tmp_path / "out", "gguf", tokenizer=tokenizer)
    names = [tensor.name for tensor in gguf.GGUFReader(tmp_path / "out/model.gguf").tensors]
    assert ("output.weight" in names) is not tied
    assert torch.equal(logits(read(tmp_path / "out")), logits(model.dequantize()))


def test_the_tokenizer_comes_along(make, tokenizer, tmp_path):
    model = make(bits=4, group_size=32)
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    model.resize_token_embeddings(400)
    lb.export(model, tmp_path / "out", "gguf", tokenizer=tokenizer)
    found = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    assert found(TEXT + "<|end|>").input_ids == tokenizer(TEXT + "<|end|>").input_ids
    assert found.chat_template == tokenizer.chat_template and found.eos_token == "<|end|>"


def test_a_missing_tokenizer_is_an_error(make, tmp_path):
    with pytest.raises(ValueError, match="pass `tokenizer=`"):
        lb.export(make(bits=4, group_size=32), tmp_path / "out", "gguf")


def test_a_tokenizer_of_another_kind_is_an_error(make, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    with pytest.raises(ValueError, match="byte-level BPE tokenizers, and this is a WordLevel"):
        lb.export(make(bits=4, group_size=32), tmp_path / "out", "gguf",
                  tokenizer=PreTrainedTokenizerFast(tokenizer_object=words))  # fmt: skip
    bpe = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match=r"splits text .* \(Whitespace\)"):
        lb.export(make(bits=4, group_size=32), tmp_path / "out", "gguf",
                  tokenizer=PreTrainedTokenizerFast(tokenizer_object=bpe))  # fmt: skip


def test_a_larger_tokenizer_is_an_error(make, tokenizer, tmp_path):
    tokenizer.add_tokens([f"<{number}>" for number in range(20)])
    with pytest.raises(ValueError, match="tokens, the model 384 rows"):
        lb.export(make(bits=4, group_size=32), tmp_path / "out", "gguf", tokenizer=tokenizer)


@pytest.mark.parametrize(
    "wishes, sentence",
    [
        ({"bits": 4, "group_size": 16}, "groups of 16 don't fit"),
        ({"bits": 8, "group_size": 32, "symmetric": False}, "8 bits have no zero points"),
    ],
    ids=["group-size", "8-bit-zero-points"],
)
def test_refusals(make, tokenizer, tmp_path, wishes, sentence):
    with pytest.raises(ValueError, match=sentence):
        lb.export(make(**wishes), tmp_path / "out", "gguf", tokenizer=tokenizer)


def test_other_architectures_are_refused(tokenizer, tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    dense = Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=1, vocab_size=384))
    model = lb.quantize(dense, lb.LowBitConfig(bits=4, group_size=32))
    with pytest.raises(ValueError, match="LlamaForCausalLM .* only, and this is a Qwen2ForCausalLM"):
        lb.export(model, tmp_path / "out", "gguf", tokenizer=tokenizer)


@pytest.mark.parametrize("field, value", [("attention_bias", True), ("hidden_act", "gelu")])
def test_unusual_llamas_are_refused(tokenizer, tmp_path, field, value):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    dense = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=384, **{field: value}))
    model = lb.quantize(dense, lb.LowBitConfig(bits=4, group_size=32))
    with pytest.raises(ValueError, match=f"{field}=.*, and this model has {value!r}"):
        lb.export(model, tmp_path / "out", "gguf", tokenizer=tokenizer)


@pytest.mark.slow
def test_smollm2_with_its_tokenizer(smollm2, tmp_path):
    config = lb.LowBitConfig(bits=4, group_size=64)
    model = AutoModelForCausalLM.from_pretrained(smollm2, quantization_config=config, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert lb.export(model, tmp_path / "out", "gguf", tokenizer=tokenizer).exact
    assert torch.equal(logits(read(tmp_path / "out")), logits(model.dequantize()))
    found = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    assert found(TEXT).input_ids == tokenizer(TEXT).input_ids
