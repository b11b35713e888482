"""State dicts: plain tensors under the module's own names, that go out and come back whole."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import hf_lowbit as lb
from tests.quantizers.architectures import BY_ID


FIELDS = {"bits": 3, "group_size": 32}
NAMES = ("llama-tied", "mixtral", "gpt-oss", "gpt2")
SOME = pytest.mark.parametrize("architecture", [BY_ID[name] for name in NAMES], ids=repr)


def load(architecture, folder):
    return architecture.auto.from_pretrained(folder)


@SOME
def test_round_trip_restores_other_weights(architecture, lowbit_folder, tmp_path):
    model = load(architecture, lowbit_folder(architecture.id, **FIELDS))
    expected = architecture(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert all(type(tensor) is torch.Tensor for tensor in model.state_dict().values())
    torch.save(model.state_dict(), tmp_path / "state.pt")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for source in (state, torch.load(tmp_path / "state.pt", weights_only=True)):
        result = model.load_state_dict(source)
        assert result.missing_keys == [] and result.unexpected_keys == []
        assert torch.equal(architecture(model), expected)
    stored = [p for name, p in model.named_parameters() if name.endswith("_scale") or p.dtype == torch.int8]
    assert stored and not any(parameter.requires_grad for parameter in stored)


@SOME
def test_trainers_resume_finds_every_tensor(architecture, lowbit_folder):
    """Trainer reads the saved file into `load_state_dict(strict=False)`: a renamed expert would stay as it was."""
    folder = lowbit_folder(architecture.id, **FIELDS)
    model = load(architecture, folder)
    expected = architecture(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    result = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert result.unexpected_keys == []
    # a tied output layer is stored with the table
    assert [name for name in result.missing_keys if not name.startswith("lm_head")] == []
    assert torch.equal(architecture(model), expected)


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_load_into_a_model_quantized_in_memory(lowbit_folder, assign):
    architecture = BY_ID["mixtral"]
    source = load(architecture, lowbit_folder("mixtral", **FIELDS))
    torch.manual_seed(1)
    other = lb.quantize(architecture.model(source.config.__class__(**architecture.fields)), lb.LowBitConfig(**FIELDS))
    other.load_state_dict(source.state_dict(), assign=assign)
    assert torch.equal(architecture(other.eval()), architecture(source))
    assert not other.model.layers[0].self_attn.q_proj.weight.requires_grad


@SOME
def test_dense_weights_do_not_load_into_a_low_bit_model(architecture, lowbit_folder):
    model = load(architecture, lowbit_folder(architecture.id, **FIELDS))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(architecture.build().state_dict(), strict=False)


@SOME
def test_low_bit_weights_do_not_load_into_a_dense_model(architecture, lowbit_folder):
    model = load(architecture, lowbit_folder(architecture.id, bits=8, group_size=32))
    with pytest.raises(RuntimeError, match="size mismatch"):
        architecture.build().load_state_dict(model.state_dict(), strict=False)


def test_saving_a_state_dict_by_hand(lowbit_folder, tmp_path):
    """What Trainer and accelerate do: `save_pretrained(state_dict=...)`."""
    architecture = BY_ID["mixtral"]
    model = load(architecture, lowbit_folder("mixtral", **FIELDS))
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    assert torch.equal(architecture(load(architecture, tmp_path)), architecture(model))


def test_low_bit_modules_hold_parameters_and_no_stored_buffer(lowbit_folder):
    """DDP sends every buffer again in each forward."""
    model = load(BY_ID["llama"], lowbit_folder("llama", **FIELDS, modules={"embed_tokens": lb.Scheme(8, 32)}))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    buffers = dict(model.named_buffers())
    assert [name for name in buffers if name in model.state_dict()] == []
    assert [name for name, b in buffers.items() if b.numel() > 0 and "inv_freq" not in name] == []


def test_pytorch_bin_files(lowbit_folder, tmp_path):
    """transformers still reads them; a tensor that is missing there is an error too."""
    architecture = BY_ID["llama"]
    model = load(architecture, lowbit_folder("llama", **FIELDS))
    model.config.save_pretrained(tmp_path)
    state = model.state_dict()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert torch.equal(architecture(load(architecture, tmp_path)), architecture(model))
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight_scale"):
        torch.save({key: tensor for key, tensor in state.items() if key != name}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ValueError, match=f"{name}` is missing"):
            load(architecture, tmp_path)


def test_safetensors_header_says_what_the_numbers_mean(lowbit_folder):
    """Public reports: ome-projects/ome#638, jundot/omlx#3489, huggingface/huggingface.js#2323."""
    folder = lowbit_folder("llama", bits=4, group_size=32)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert metadata["hf_lowbit_format_version"] == "1"
    assert int(metadata["total_parameters"]) == BY_ID["llama"].build().num_parameters()
    # 4 bits and a 16-bit scale for 32 of them
    assert float(metadata["low_bit_bits_per_weight"]) == 4.5
