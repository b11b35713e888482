"""Output layers that share the token table: dense by default, one low-bit table when asked.

Public reports: neuralmagic/AutoFP8#31, vllm-project/llm-compressor#2835, huggingface/transformers#37905 and #35080,
intel/auto-round#101, casper-hansen/AutoAWQ#665.
"""

import copy

import pytest
import torch
from safetensors.torch import load_file

import hf_lowbit as lb
from hf_lowbit.nn.packed import LowBitModule
from tests.quantizers.architectures import BY_ID


# architecture -> (name that asks for the table, parameter that is stored)
TABLES = {
    "llama-tied": ("embed_tokens", "model.embed_tokens.weight"),
    "gemma": ("lm_head", "model.embed_tokens.weight"),
    "gemma3": ("embed_tokens", "model.embed_tokens.weight"),
    "gpt2": ("wte", "transformer.wte.weight"),
    "bloom": ("word_embeddings", "transformer.word_embeddings.weight"),
    "t5-relu": ("shared", "shared.weight"),
    "bart": ("shared", "model.shared.weight"),
    "opt": ("embed_tokens", "model.decoder.embed_tokens.weight"),
    # its output layer has a bias, which tying fits to the shape of the table
    "bert-masked-lm": ("word_embeddings", "bert.embeddings.word_embeddings.weight"),
}
EVERYWHERE = pytest.mark.parametrize("architecture", [BY_ID[name] for name in TABLES], ids=repr)
# rounding the table to 8 bits with zero points, relative to the norm of the logits of a dense table
TABLE_CLOSE = 0.05


def with_table(architecture, bits=8):
    return lb.LowBitConfig(bits=8, group_size=32, modules={TABLES[architecture.id][0]: lb.Scheme(bits, 16, False)})


def size(folder):
    return (folder / "model.safetensors").stat().st_size


def shared(model):
    """Are input table and output layer one set of tensors?"""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = ["weight", "weight_scale", "weight_zero_point"] if isinstance(table, LowBitModule) else ["weight"]
    return all(getattr(table, name) is getattr(head, name) for name in names)


@EVERYWHERE
def test_table_stays_dense_and_tied_by_default(architecture, dense_folder, tmp_path):
    config = lb.LowBitConfig(bits=8, group_size=32)
    model = architecture.auto.from_pretrained(dense_folder(architecture.id), quantization_config=config)
    assert not isinstance(model.get_input_embeddings(), LowBitModule)
    assert not isinstance(model.get_output_embeddings(), LowBitModule)
    model.save_pretrained(tmp_path)
    assert size(tmp_path) < size(dense_folder(architecture.id))
    assert not any(key.startswith("lm_head") for key in load_file(tmp_path / "model.safetensors"))
    for one in (model, architecture.auto.from_pretrained(tmp_path), copy.deepcopy(model)):
        assert shared(one)


@EVERYWHERE
def test_one_low_bit_table(architecture, dense_folder, tmp_path):
    dense = architecture.build()
    config = with_table(architecture)
    model = architecture.auto.from_pretrained(dense_folder(architecture.id), quantization_config=config)
    assert isinstance(model.get_input_embeddings(), LowBitModule)
    assert isinstance(model.get_output_embeddings(), LowBitModule)
    logits = architecture(model)
    assert (logits - architecture(dense)).norm() <= TABLE_CLOSE * architecture(dense).norm()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = TABLES[architecture.id][1]
    assert {name, f"{name}_scale", f"{name}_zero_point"} <= stored.keys()
    assert not any(key.startswith(("lm_head", "model.encoder.embed_tokens", "encoder.embed_tokens")) for key in stored)
    reloaded = architecture.auto.from_pretrained(tmp_path)
    in_memory = lb.quantize(copy.deepcopy(dense), with_table(architecture))
    for one in (model, reloaded, in_memory, copy.deepcopy(model)):
        assert shared(one)
        assert one.num_parameters() == dense.num_parameters()
        assert one.num_parameters(exclude_embeddings=True) == dense.num_parameters(exclude_embeddings=True)
        assert torch.equal(architecture(one), logits)


@EVERYWHERE
def test_low_bit_table_makes_the_file_smaller(architecture, dense_folder, tmp_path):
    sizes = []
    for config in (lb.LowBitConfig(bits=8, group_size=32), with_table(architecture), with_table(architecture, 2)):
        model = architecture.auto.from_pretrained(dense_folder(architecture.id), quantization_config=config)
        model.save_pretrained(tmp_path / str(len(sizes)))
        sizes.append(size(tmp_path / str(len(sizes))))
    assert size(dense_folder(architecture.id)) > sizes[0] > sizes[1] > sizes[2]


@EVERYWHERE
def test_dequantized_table_is_tied_again(architecture, dense_folder, tmp_path):
    config = with_table(architecture)
    model = architecture.auto.from_pretrained(dense_folder(architecture.id), quantization_config=config)
    dense = copy.deepcopy(model).dequantize()
    assert shared(dense) and not isinstance(dense.get_input_embeddings(), LowBitModule)
    dense.save_pretrained(tmp_path)
    assert (
        load_file(tmp_path / "model.safetensors").keys()
        == load_file(dense_folder(architecture.id) / "model.safetensors").keys()
    )
    again = architecture.auto.from_pretrained(tmp_path)
    assert shared(again)
    assert torch.equal(architecture(again), architecture(dense))


@pytest.mark.parametrize("table", ["dense", "low-bit"])
@pytest.mark.parametrize("tokens", [72, 50], ids=["more", "fewer"])
@pytest.mark.parametrize("architecture", [BY_ID["llama-tied"], BY_ID["llama"], BY_ID["gpt2"]], ids=repr)
def test_resize_token_embeddings(architecture, table, tokens, dense_folder, tmp_path):
    name = "wte" if architecture.id == "gpt2" else "embed_tokens"
    config = lb.LowBitConfig(bits=8, group_size=32, modules={name: lb.Scheme(8, 16)} if table == "low-bit" else None)
    model = architecture.auto.from_pretrained(dense_folder(architecture.id), quantization_config=config)
    ids = torch.tensor([[1, 5, 9, 33, 7, 21]])
    with torch.inference_mode():
        before = model(input_ids=ids).logits
        model.resize_token_embeddings(tokens)
        after = model(input_ids=ids).logits
    assert after.shape[-1] == tokens
    kept = min(tokens, 64)
    assert torch.equal(after[..., :kept], before[..., :kept])
    assert torch.isfinite(after).all()
    assert shared(model) == (architecture.id != "llama")
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        assert torch.equal(architecture.auto.from_pretrained(tmp_path)(input_ids=ids).logits, after)


def test_untied_table_and_output_layer_have_their_own_schemes(dense_folder, tmp_path):
    architecture = BY_ID["llama"]
    schemes = {"embed_tokens": lb.Scheme(4, 32), "lm_head": lb.Scheme(8, None)}
    config = lb.LowBitConfig(bits=4, group_size=32, modules=schemes)
    model = architecture.auto.from_pretrained(dense_folder("llama"), quantization_config=config)
    assert model.get_input_embeddings().lowbit["weight"].scheme.bits == 4
    assert model.get_output_embeddings().lowbit["weight"].scheme.bits == 8
    assert not shared_memory(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(architecture(architecture.auto.from_pretrained(tmp_path)), architecture(model))


def shared_memory(model):
    return model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()


def test_two_schemes_for_one_table_are_refused(dense_folder):
    config = lb.LowBitConfig(modules={"embed_tokens": lb.Scheme(4, 32), "lm_head": lb.Scheme(8, 32)})
    with pytest.raises(ValueError, match="tied as one tensor"):
        BY_ID["llama-tied"].auto.from_pretrained(dense_folder("llama-tied"), quantization_config=config)
