"""GPTQ checkpoints of every width come in bit for bit, and what our layers can't hold is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import hf_lowbit as lb
from hf_lowbit.imports.words import unpack_words
from tests.exports.compare import dense_weights
from tests.imports import gptq_writer


IDS = torch.arange(3, 43).view(2, 20)
CASES = [
    pytest.param(bits, sym, layout, id=f"{bits}-bit-{'sym' if sym else 'asym'}-{layout}")
    for bits in (2, 3, 4, 8)
    for sym in (True, False)
    for layout in ("gptq", "gptq_v2")
]


@given(st.sampled_from([2, 3, 4, 8]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_words_of_the_writer_are_read(bits, blocks, rows, seed):
    fields = torch.randint(0, 1 << bits, (32 * blocks, rows), generator=torch.Generator().manual_seed(seed))
    words = gptq_writer.pack_rows(fields.numpy(), bits)
    assert torch.equal(unpack_words(words.t(), bits, 32 * blocks), fields.t().to(torch.uint8))


@pytest.mark.parametrize("bits, sym, layout", CASES)
def test_codes_scales_and_numbers_are_the_source_s(llama, tmp_path, bits, sym, layout):
    layers = gptq_writer.write(tmp_path / "gptq", llama, bits=bits, group_size=32, sym=sym, layout=layout)
    result = lb.import_checkpoint(tmp_path / "gptq", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.float16
    weights = dense_weights(model, torch.float16)
    assert sorted(weights) == sorted(layers) == sorted(result.modules)
    for name, layer in layers.items():
        codes, scale, zero_point = lb.codes(model.get_submodule(name))
        middle = 1 << (bits - 1)
        assert torch.equal(codes.to(torch.int64), layer.codes.t() - middle)
        assert scale.dtype == torch.float32 and torch.equal(scale, layer.scales.t().to(torch.float32))
        assert (zero_point is None) == sym
        assert sym or torch.equal(zero_point.to(torch.int64), layer.zeros.t() - middle)
        assert torch.equal(weights[name], layer.dense(torch.float16))


@pytest.mark.parametrize("activations", ["gradient", "saved"])
def test_it_lives_on_as_any_low_bit_model(llama, tmp_path, activations):
    layers = gptq_writer.write(tmp_path / "gptq", llama, bits=4, group_size=32, sym=False)
    lb.import_checkpoint(tmp_path / "gptq", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    dense = llama.float()
    for name, layer in layers.items():
        dense.get_submodule(name).weight.data = layer.dense(torch.float32)
    for name, tensor in dense.state_dict().items():
        if name not in {f"{n}.weight" for n in layers}:
            tensor.copy_(tensor.to(torch.float16))
    if activations == "saved":
        model.save_pretrained(tmp_path / "again")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    # kernels sum in another order
    torch.testing.assert_close(model(IDS).logits, dense(IDS).logits, atol=2e-5, rtol=1e-4)
    assert torch.equal(model.dequantize()(IDS).logits, dense(IDS).logits)


def test_one_scale_a_channel_and_its_order(llama, tmp_path):
    # one group covers the row: any order of channels is the same
    layers = gptq_writer.write(tmp_path / "gptq", llama, bits=4, group_size=-1, sym=True, order=True)
    lb.import_checkpoint(tmp_path / "gptq", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert all(torch.equal(w, layers[n].dense(torch.float16)) for n, w in dense_weights(model, torch.float16).items())


def test_widths_of_single_layers_and_an_older_config(llama, tmp_path):
    wide = "model.layers.0.mlp.down_proj"
    layers = gptq_writer.write(
        tmp_path / "gptq", llama, bits=4, group_size=32, sym=True, dynamic={wide: 8}, older=True, zero_bias=True
    )
    result = lb.import_checkpoint(tmp_path / "gptq", tmp_path / "out")
    assert result.modules[wide].bits == 8 and "1 modules of 8 bits" in str(result)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(dense_weights(model, torch.float16)[wide], layers[wide].dense(torch.float16))
    assert not any(name.endswith("bias") for name in model.state_dict())


def test_conv1d_of_gpt2(tmp_path):
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(0)
    layers = {
        f"transformer.h.0.{name}": gptq_writer.Layer(rows, columns, 4, 32, False, generator)
        for name, rows, columns in [("attn.c_attn", 96, 32), ("attn.c_proj", 32, 32), ("mlp.c_fc", 128, 32)]
    }
    gptq_writer.write(tmp_path / "gptq", gpt2, bits=4, group_size=32, sym=False)
    gptq_writer.replace(tmp_path / "gptq", layers)
    lb.import_checkpoint(tmp_path / "gptq", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, layer in layers.items():
        assert torch.equal(model.get_submodule(name).dense_weight(dtype=torch.float16), layer.dense(torch.float16).t())


def test_groups_in_gptq_s_own_order_are_refused(llama, tmp_path):
    gptq_writer.write(tmp_path / "gptq", llama, bits=4, group_size=32, sym=True, order=True)
    with pytest.raises(ValueError, match="its groups follow GPTQ's order"):
        lb.import_checkpoint(tmp_path / "gptq", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_adapters_train_on_it(llama, tmp_path):
    peft = pytest.importorskip("peft")
    gptq_writer.write(tmp_path / "gptq", llama, bits=4, group_size=32, sym=True)
    lb.import_checkpoint(tmp_path / "gptq", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" in n)
