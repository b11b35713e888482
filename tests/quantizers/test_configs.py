"""How a config reaches the model: objects and dicts, reuse, double quantization, conflicts, dequantizing."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig

import hf_lowbit as lb
from hf_lowbit.nn.packed import LowBitModule
from tests.quantizers.architectures import BY_ID


# transformers says so whenever a config meets a quantized checkpoint
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config` or equivalent parameters")

FIELDS = {"bits": 3, "group_size": 32}
# the numbers of a float32 model are rounded once to half precision
HALF_PRECISION = 0.02


def has_lowbit(model):
    return any(isinstance(module, LowBitModule) for module in model.modules())


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"quant_method": "hf_lowbit", "bits": 3, "group_size": 32}, id="dict"),
        pytest.param(
            {"quant_method": "hf_lowbit", **FIELDS, "modules": {"up_proj": {"bits": 3, "group_size": 32}}},
            id="dict-with-scheme",
        ),
        pytest.param(lb.LowBitConfig(**FIELDS, modules={"re:.*up_proj": lb.Scheme(3, 32)}), id="pattern"),
    ],
)
def test_config_as_dict(dense_folder, lowbit_folder, config):
    architecture = BY_ID["llama"]
    model = AutoModelForCausalLM.from_pretrained(dense_folder("llama"), quantization_config=config)
    same = AutoModelForCausalLM.from_pretrained(lowbit_folder("llama", **FIELDS))
    assert torch.equal(architecture(model), architecture(same))
    assert torch.equal(architecture(lb.quantize(architecture.build(), config)), architecture(same))


def test_one_config_for_two_models(dense_folder):
    config = lb.LowBitConfig(bits=4, group_size=32, modules={"re:.*mlp.*": lb.Scheme(8, 16)})
    before = config.to_json_string()
    for name in ("llama", "qwen3-moe"):
        BY_ID[name].auto.from_pretrained(dense_folder(name), quantization_config=config)
        lb.quantize(BY_ID[name].build(), config)
    assert config.to_json_string() == before
    assert not config.is_resolved


def test_saved_config_is_plain_json_and_complete(lowbit_folder):
    saved = config_of(lowbit_folder("mixtral", **FIELDS))["quantization_config"]
    assert saved["quant_method"] == "hf_lowbit" and saved["format_version"] == 1
    experts = saved["modules"]["model.layers.1.mlp.experts.gate_up_proj"]
    assert experts == {"bits": 3, "group_size": 32, "symmetric": False, "activations": "float", "shape": [4, 192, 64]}
    assert AutoConfig.from_pretrained(lowbit_folder("mixtral", **FIELDS)).quantization_config == saved


def test_same_config_on_a_low_bit_checkpoint_changes_nothing(lowbit_folder):
    folder = lowbit_folder("llama", **FIELDS)
    again = AutoModelForCausalLM.from_pretrained(folder, quantization_config=lb.LowBitConfig(**FIELDS))
    assert torch.equal(BY_ID["llama"](again), BY_ID["llama"](AutoModelForCausalLM.from_pretrained(folder)))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        pytest.param({"bits": 4, "group_size": 32}, "`bits`=3.*asks for `bits`=4", id="bits"),
        pytest.param({"bits": 3, "group_size": 64}, "`group_size`=32.*asks for `group_size`=64", id="group-size"),
        pytest.param({**FIELDS, "symmetric": True}, "`symmetric`=False.*asks for `symmetric`=True", id="symmetric"),
        pytest.param({**FIELDS, "activations": "int8"}, "`activations`='float'.*asks for", id="activations"),
    ],
)
def test_another_config_on_a_low_bit_checkpoint_is_refused(lowbit_folder, fields, named):
    with pytest.raises(ValueError, match=f"already low-bit, with {named}"):
        AutoModelForCausalLM.from_pretrained(
            lowbit_folder("llama", **FIELDS), quantization_config=lb.LowBitConfig(**fields)
        )


@pytest.mark.parametrize(
    "other", [BitsAndBytesConfig(load_in_8bit=True), QuantoConfig()], ids=["bitsandbytes", "quanto"]
)
def test_another_librarys_config_on_a_low_bit_checkpoint_is_refused(lowbit_folder, other):
    with pytest.raises(ValueError, match="LowBitConfig"):
        AutoModelForCausalLM.from_pretrained(lowbit_folder("llama", **FIELDS), quantization_config=other)


def test_a_low_bit_model_is_not_quantized_again(lowbit_folder):
    model = AutoModelForCausalLM.from_pretrained(lowbit_folder("llama", **FIELDS))
    with pytest.raises(ValueError, match="already low-bit"):
        lb.quantize(model, lb.LowBitConfig(**FIELDS))


def test_dequantize_while_loading(lowbit_folder, dense_folder, tmp_path):
    folder = lowbit_folder("mixtral", **FIELDS)
    low = AutoModelForCausalLM.from_pretrained(folder)
    dense = AutoModelForCausalLM.from_pretrained(folder, quantization_config=lb.LowBitConfig(dequantize=True))
    assert not has_lowbit(dense)
    assert not hasattr(dense.config, "quantization_config") and not getattr(dense, "is_quantized", False)
    assert not hasattr(dense, "hf_quantizer")
    expected = BY_ID["mixtral"](low.dequantize())
    assert torch.equal(BY_ID["mixtral"](dense), expected)
    dense.save_pretrained(tmp_path)
    assert (
        load_file(tmp_path / "model.safetensors").keys()
        == load_file(dense_folder("mixtral") / "model.safetensors").keys()
    )
    assert torch.equal(BY_ID["mixtral"](AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


def test_dequantize_needs_a_low_bit_checkpoint(dense_folder):
    with pytest.raises(ValueError, match="`dequantize`=True needs a low-bit checkpoint"):
        AutoModelForCausalLM.from_pretrained(
            dense_folder("llama"), quantization_config=lb.LowBitConfig(dequantize=True)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dequantized_model_has_the_models_dtype(lowbit_folder, dtype):
    folder = lowbit_folder("llama", **FIELDS)
    expected = BY_ID["llama"](AutoModelForCausalLM.from_pretrained(folder))
    later = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).dequantize()
    loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=lb.LowBitConfig(dequantize=True)
    )
    asked = AutoModelForCausalLM.from_pretrained(folder).dequantize(dtype=dtype)
    moved = AutoModelForCausalLM.from_pretrained(folder).to(dtype).dequantize()
    # a dtype that is asked for is that of the layers that were dense all along, too
    for model in (later, loading, asked, moved):
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert (BY_ID["llama"](model) - expected).norm() <= HALF_PRECISION * expected.norm()
    # what was dequantized trains again
    assert all(parameter.requires_grad for parameter in later.parameters())


def test_dequantized_model_can_be_quantized_again(lowbit_folder):
    """Its numbers lie on the grid: the second rounding loses nothing at the same width or wider."""
    model = AutoModelForCausalLM.from_pretrained(lowbit_folder("llama", **FIELDS))
    expected = BY_ID["llama"](model)
    again = lb.quantize(model.dequantize(), lb.LowBitConfig(bits=8, group_size=32))
    assert has_lowbit(again)
    assert (BY_ID["llama"](again) - expected).norm() <= HALF_PRECISION * expected.norm()
