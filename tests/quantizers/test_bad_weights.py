"""Dense weights that can't be rounded, or that round to nothing; models in which there is nothing to convert."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

import hf_lowbit as lb
from hf_lowbit.nn.packed import LowBitModule
from tests.quantizers.architectures import BY_ID, DECODER, RESNET


UP = "model.layers.1.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
ALL_WIDTHS = pytest.mark.parametrize("bits", ["ternary", 2, 3, 4, 8])


def spoiled(architecture, *names, value):
    model = BY_ID[architecture].build()
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).view(-1)[-1] = value
    return model


def unchanged(model, names):
    return [n for n, m in model.named_modules() if isinstance(m, LowBitModule)] == [] and all(
        model.get_parameter(name).dtype == torch.float32 for name in names
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("architecture", "parameter", "layer"),
    [
        pytest.param("llama", f"{UP}.weight", UP, id="linear"),
        pytest.param("mixtral", EXPERTS, EXPERTS, id="experts"),
        pytest.param("gpt2", "transformer.h.1.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc", id="conv1d"),
    ],
)
def test_on_the_fly_names_the_layer(architecture, parameter, layer, value, tmp_path, caplog):
    spoiled(architecture, parameter, value=value).save_pretrained(tmp_path)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=lb.LowBitConfig(group_size=32))
    # transformers collects the errors of a load, reports them in its log and raises a summary
    told = f"{caught.value}\n{caplog.text}"
    assert f"`{layer}`: the weight holds NaN or infinity" in told


def test_weight_of_another_shape(tmp_path, caplog):
    """As many numbers, in other places: reshaped, they would pass for the weight."""
    BY_ID["llama"].build().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].t().contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises((ValueError, RuntimeError)) as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=lb.LowBitConfig(group_size=32))
    assert f"`{UP}`: the weight has shape (64, 96), the model's is (96, 64)" in f"{caught.value}\n{caplog.text}"


def test_table_of_another_shape(dense_folder):
    with pytest.raises((ValueError, RuntimeError), match="embed_tokens.weight|ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(
            dense_folder("llama"), quantization_config=lb.LowBitConfig(group_size=32), vocab_size=70
        )


@ALL_WIDTHS
def test_in_memory_names_every_layer_and_changes_nothing(bits):
    model = spoiled("llama", f"{UP}.weight", f"{DOWN}.weight", value=float("nan"))
    with pytest.raises(ValueError, match=f"`{DOWN}`, `{UP}` hold NaN or infinity"):
        lb.quantize(model, lb.LowBitConfig(bits=bits, group_size=32))
    assert unchanged(model, [f"{UP}.weight", f"{DOWN}.weight"])


def test_spoiled_layer_may_stay_dense(tmp_path):
    model = spoiled("llama", f"{UP}.weight", value=float("nan"))
    model.save_pretrained(tmp_path)
    config = lb.LowBitConfig(group_size=32, modules_to_not_convert=[UP])
    on_the_fly = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    for one in (on_the_fly, lb.quantize(model, config)):
        assert torch.isnan(one.get_parameter(f"{UP}.weight")).sum() == 1


@ALL_WIDTHS
@pytest.mark.parametrize("group_size", [32, None, "tensor"])
def test_zeros_stay_zeros(bits, group_size, tmp_path):
    """A whole weight, a row and a group."""
    model = BY_ID["llama"].build()
    with torch.no_grad():
        model.get_parameter(f"{UP}.weight").zero_()
        model.get_parameter(f"{DOWN}.weight")[3] = 0
        model.get_parameter(f"{DOWN}.weight")[5, 32:64] = 0
    model.save_pretrained(tmp_path)
    config = lb.LowBitConfig(bits=bits, group_size=group_size)
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    up, down = quantized.get_submodule(UP), quantized.get_submodule(DOWN)
    assert torch.count_nonzero(up.dense_weight()) == 0
    assert torch.count_nonzero(down.dense_weight()[3]) == 0
    assert torch.count_nonzero(down.dense_weight()[5, 32:64]) == 0
    for module in (up, down):
        assert torch.isfinite(module.weight_scale).all() and (module.weight_scale > 0).all()
    assert torch.isfinite(BY_ID["llama"](quantized)).all()


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e20, 1e37])
@ALL_WIDTHS
def test_weights_at_the_ends_of_float32(bits, scale):
    layer = nn.Sequential(nn.Linear(64, 8, bias=False))
    with torch.no_grad():
        layer[0].weight.copy_(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * scale)
    weight = layer[0].weight.detach().clone()
    lb.quantize(layer, lb.LowBitConfig(bits=bits, group_size=32))
    dense = layer[0].dense_weight()
    assert torch.isfinite(dense).all()
    # the sign survives wherever the code is not zero
    assert (dense * weight.sign() >= 0).all()


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        pytest.param("modules_to_not_convert", "up_projection", id="skip-name"),
        pytest.param("modules_to_not_convert", "up", id="skip-part-of-a-name"),
        pytest.param("modules_to_not_convert", "re:.*up", id="skip-pattern"),
        pytest.param("modules", "re:layers[.]7[.].*", id="scheme-pattern"),
        pytest.param("modules", "mlp.gate", id="scheme-name"),
    ],
)
def test_pattern_that_matches_nothing(field, pattern, dense_folder):
    value = [pattern] if field == "modules_to_not_convert" else {pattern: lb.Scheme(8)}
    config = lb.LowBitConfig(group_size=32, **{field: value})
    model = BY_ID["llama"].build()
    with pytest.raises(ValueError, match="matches no module of LlamaForCausalLM"):
        AutoModelForCausalLM.from_pretrained(dense_folder("llama"), quantization_config=config)
    with pytest.raises(ValueError, match="matches no module of LlamaForCausalLM"):
        lb.quantize(model, config)
    assert unchanged(model, [f"{UP}.weight"])


def test_everything_skipped_is_an_error(dense_folder):
    config = lb.LowBitConfig(modules_to_not_convert=["layers"])
    with pytest.raises(ValueError, match="nothing of LlamaForCausalLM would be converted"):
        AutoModelForCausalLM.from_pretrained(dense_folder("llama"), quantization_config=config)


def test_model_without_layers():
    model = LlamaForCausalLM(LlamaConfig(**{**DECODER, "num_hidden_layers": 0}))
    with pytest.raises(ValueError, match="nothing of LlamaForCausalLM would be converted.*lm_head"):
        lb.quantize(model, lb.LowBitConfig())


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("resnet")
    ResNetForImageClassification(ResNetConfig(**RESNET)).save_pretrained(folder)
    return folder


def test_convolutions_are_an_error_that_says_why(resnet):
    with pytest.raises(ValueError, match="nothing of ResNetForImageClassification would be converted.*classifier"):
        AutoModelForImageClassification.from_pretrained(resnet, quantization_config=lb.LowBitConfig())


def test_report_on_a_dense_model_says_what_is_not_covered(resnet):
    model = AutoModelForImageClassification.from_pretrained(resnet)
    report = lb.report(model)
    assert report.lowbit_parameters == 0
    assert report.total_parameters == model.num_parameters() == sum(module.parameters for module in report.modules)
    reasons = {module.name: module.reason for module in report.modules}
    assert reasons["classifier.1.weight"] == "task head"
    assert "Conv2d" in reasons["resnet.encoder.stages.0.layers.0.layer.0.convolution.weight"]
    inspection = lb.inspect(resnet)
    assert inspection.convertible_parameters == 0
    assert {m.name: m.reason for m in inspection.modules}["classifier.1"] == "task head"


def test_classifier_alone_when_it_is_asked_for(resnet):
    config = lb.LowBitConfig(bits=8, group_size=None, modules={"classifier.1": lb.Scheme(8, None)})
    model = AutoModelForImageClassification.from_pretrained(resnet, quantization_config=config)
    assert [name for name, m in model.named_modules() if isinstance(m, LowBitModule)] == ["classifier.1"]
