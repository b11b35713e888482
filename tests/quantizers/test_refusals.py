"""What would load or run as something else than it says is refused, with the name of the layer."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    FalconConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Swinv2Config,
)

import hf_lowbit as lb


CONFIG = lb.LowBitConfig(bits=4, group_size=32)
# 8 bits in groups of 32 on layers of 64 inputs
CLOSE_AT_8_BITS = 0.02


@pytest.fixture
def dense():
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes))


@pytest.fixture
def checkpoint(dense, tmp_path):
    lb.quantize(dense, CONFIG).save_pretrained(tmp_path / "low-bit")
    return tmp_path / "low-bit"


def test_nan_on_the_fly_names_every_layer(dense, tmp_path):
    for index in (0, 1):
        dense.model.layers[index].mlp.up_proj.weight.data[0, index] = torch.nan
    dense.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj`.*layers\.1\.mlp\.up_proj`"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=CONFIG)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        pytest.param({"modules": {"nope": lb.Scheme(2)}}, "'nope', which matches nothing", id="unknown-module"),
        pytest.param({"modules": {"up_proj": lb.Scheme(2)}}, r"up_proj.*bits=4", id="other-scheme"),
        pytest.param({"modules_to_not_convert": ["up_proj"]}, "holds .*up_proj` low-bit", id="skipped"),
    ],
)
def test_names_that_disagree_with_the_checkpoint(checkpoint, wish, message):
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(
            checkpoint, quantization_config=lb.LowBitConfig(bits=4, group_size=32, **wish)
        )


def test_the_config_that_made_a_checkpoint_may_be_passed_again(dense, tmp_path):
    config = lb.LowBitConfig(bits=4, group_size=32, modules={"re:.*down_proj": lb.Scheme(8)},
                             modules_to_not_convert=["layers.0.self_attn"])  # fmt: skip
    lb.quantize(dense, config).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert again.config.quantization_config.modules["model.layers.1.mlp.down_proj"].bits == 8


def test_zero_points_the_config_denies(dense, tmp_path):
    lb.quantize(dense, lb.LowBitConfig(bits=2, group_size=32)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for entry in config["quantization_config"]["modules"].values():
        entry["symmetric"] = True
    del config["quantization_config"]["modules_digest"]
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="zero_point` is there, but the config says `symmetric`"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_state_dict_of_floats(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    floats = {name: tensor.float() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"q_proj\.weight` must be torch\.int8, got torch\.float32"):
        model.load_state_dict(floats)


def test_dequantize_of_offloaded_weights(checkpoint, tmp_path):
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
              "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(checkpoint, device_map=places, offload_folder=tmp_path / "offload")
    before = model(torch.tensor([[1, 2, 3]])).logits
    with pytest.raises(ValueError, match="is offloaded"):
        model.dequantize()
    assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, before)


def test_integers_are_no_activations(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(TypeError, match=r"Expected floating-point activations. Got torch\.int64"):
        model.model.layers[0].mlp.up_proj(torch.ones(2, 64, dtype=torch.long))


def test_a_linear_class_that_spells_the_product_out():
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(FalconConfig(**sizes)).eval()
    dense = model(torch.tensor([[1, 2, 3]])).logits
    lb.quantize(model, lb.LowBitConfig(bits=8, group_size=32))
    low = model(torch.tensor([[1, 2, 3]])).logits
    assert (low - dense).abs().max() <= CLOSE_AT_8_BITS * dense.abs().max()
    assert type(model.dequantize().transformer.h[0].mlp.dense_4h_to_h).__name__ == "FalconLinear"


def test_a_dtype_taken_from_the_first_parameter(tmp_path):
    sizes = {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 32,
        "depths": [1, 1],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    model = AutoModelForImageClassification.from_config(Swinv2Config(**sizes))
    model.save_pretrained(tmp_path)
    low = AutoModelForImageClassification.from_pretrained(
        tmp_path, quantization_config=lb.LowBitConfig(bits=8, group_size=16)
    )
    name = "swinv2.encoder.layers.0.blocks.0.attention.self.relative_coords_table"
    assert torch.equal(dict(low.named_buffers())[name], dict(model.named_buffers())[name])


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize("place", ["data", "parameter"])
def test_floats_assigned_to_a_low_bit_layer(dense, place, gradients):
    """Read as codes they would give numbers that mean nothing, without a word."""
    layer = lb.quantize(dense, CONFIG).model.layers[0].mlp.up_proj
    x, floats = torch.randn(2, 64), torch.randn(96, 64)
    with torch.no_grad():
        # a kernel was chosen before
        layer(x)
    if place == "data":
        layer.weight.data = floats
    else:
        layer.weight = torch.nn.Parameter(floats)
    with torch.set_grad_enabled(gradients), pytest.raises(TypeError, match="float32 .*packed codes are torch.int8"):
        layer(x)


@pytest.mark.parametrize("name", ["mixtral", "llama-tied"])
def test_floats_assigned_to_experts_and_tables(name):
    from tests.quantizers.architectures import BY_ID, IDS

    model = BY_ID[name].build()
    table = name == "llama-tied"
    wish = {"embed_tokens": lb.Scheme(8, 32)} if table else None
    lb.quantize(model, lb.LowBitConfig(bits=4, group_size=32, modules=wish))
    parameter = model.get_parameter("model.embed_tokens.weight" if table else "model.layers.0.mlp.experts.down_proj")
    parameter.data = torch.randn(parameter.shape)
    with torch.no_grad(), pytest.raises(TypeError, match="packed codes are torch.int8"):
        model(IDS)
