"""A part of a low-bit model, or the model around a low-bit part, saved on its own."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import hf_lowbit as lb
from tests.quantizers.architectures import BY_ID, IDS


CONFIG = lb.LowBitConfig(bits=4, group_size=32)


class Wrapper(nn.Module):
    """A language model inside a module of the user's own."""

    def __init__(self):
        super().__init__()
        self.inner = BY_ID["llama"].build()
        self.head = nn.Linear(64, 2)

    def forward(self, ids):
        return self.head(self.inner(ids).logits)


def assert_same_state(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def low_bit(architecture, made, tmp_path):
    dense = BY_ID[architecture].build()
    if made == "in memory":
        return lb.quantize(dense, CONFIG)
    dense.save_pretrained(tmp_path / "dense")
    return BY_ID[architecture].auto.from_pretrained(tmp_path / "dense", quantization_config=CONFIG)


@pytest.mark.parametrize("made", ["in memory", "on the fly"])
@pytest.mark.parametrize(
    ("architecture", "part", "auto"),
    [
        pytest.param("llava", "model.vision_tower", AutoModel, id="vision-tower"),
        pytest.param("llava", "model.language_model", AutoModel, id="language-model"),
        pytest.param("clip", "vision_model", AutoModel, id="clip-vision"),
        pytest.param("whisper", "model.encoder", WhisperEncoder, id="encoder"),
        pytest.param("mixtral", "model", AutoModel, id="base"),
    ],
)
def test_a_part_is_a_checkpoint_of_its_own(architecture, part, auto, made, tmp_path):
    model = low_bit(architecture, made, tmp_path)
    before, config = model.state_dict(), copy.deepcopy(model.config.to_dict())
    module = model.get_submodule(part)
    module.save_pretrained(tmp_path / "part")
    assert_same_state(auto.from_pretrained(tmp_path / "part"), module)
    # saving changed nothing, and the whole still saves
    assert model.config.to_dict() == config
    assert "hf_quantizer" not in vars(module)
    model.save_pretrained(tmp_path / "whole")
    assert_same_state(BY_ID[architecture].auto.from_pretrained(tmp_path / "whole"), model)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_the_model_inside_a_quantized_wrapper(tmp_path):
    wrapper = lb.quantize(Wrapper(), CONFIG)
    wrapper.inner.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, wrapper.inner(IDS).logits)


def test_the_model_around_a_quantized_part(tmp_path):
    model = BY_ID["llama"].build()
    lb.quantize(model.model, CONFIG)
    model.save_pretrained(tmp_path)
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_a_part_of_a_sparse_model(tmp_path):
    model = lb.quantize(BY_ID["llama"].build(), lb.BlastConfig(sparsity=0.5, block_size=16))
    model.model.save_pretrained(tmp_path)
    assert_same_state(AutoModel.from_pretrained(tmp_path), model.model)


def test_a_dense_part_stays_plain(tmp_path):
    model = lb.quantize(
        BY_ID["llava"].build(), lb.LowBitConfig(group_size=32, modules_to_not_convert=["vision_tower"])
    )
    model.model.vision_tower.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()


def test_a_single_layer_of_a_model(tmp_path):
    """A layer may hold the model's config without being a model."""
    model = BY_ID["llama"].build()
    layer = lb.quantize(model.model.layers[0], CONFIG)
    mlp = lb.quantize(model.model.layers[1].mlp, CONFIG)
    assert lb.report(layer).lowbit_parameters and lb.report(mlp).lowbit_parameters
    assert getattr(model.config, "quantization_config", None) is None
