"""`quantize` on models that no checkpoint was read for: plain torch modules, fresh models, and what it refuses."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_lowbit as lb
from hf_lowbit.nn.packed import LowBitModule
from tests.quantizers.architectures import BY_ID, DECODER


CONFIG = lb.LowBitConfig(bits=8, group_size=16)
# 8-bit weights, relative to the norm of the dense output
CLOSE = 0.02


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32, bias=False), nn.LayerNorm(32))


def test_plain_torch_module():
    dense = perceptron()
    model = lb.quantize(copy.deepcopy(dense), CONFIG)
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (model(x) - dense(x)).norm() <= CLOSE * dense(x).norm()
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
        assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert [type(m).__name__ for m in model] == ["LowBitLinear", "ReLU", "LowBitLinear", "LayerNorm"]
    assert model[2].bias is None and torch.equal(model[0].bias, dense[0].bias)
    report = lb.report(model)
    assert report.total_parameters == sum(parameter.numel() for parameter in dense.parameters())
    assert report.lowbit_parameters == 48 * 64 + 64 * 32


def test_state_dict_of_a_plain_module_restores_another():
    model, other = lb.quantize(perceptron(), CONFIG), lb.quantize(perceptron().apply(_redraw), CONFIG)
    x = torch.ones(1, 48)
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


def _redraw(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)


def test_single_layer():
    layer = lb.quantize(nn.Linear(32, 16), CONFIG)
    assert isinstance(layer, LowBitModule) and layer.weight.dtype == torch.int8


def test_shared_module_is_converted_once():
    layer = nn.Linear(32, 32)
    model = lb.quantize(nn.Sequential(layer, nn.ReLU(), layer), CONFIG)
    assert model[0] is model[2]
    assert lb.report(model).lowbit_parameters == 32 * 32


def test_shared_weight_stays_dense_unless_asked():
    model = nn.ModuleDict({"one": nn.Linear(32, 32), "two": nn.Linear(32, 32), "three": nn.Linear(32, 32)})
    model["two"].weight = model["one"].weight
    lb.quantize(copy.deepcopy(model), CONFIG)
    by_default = lb.quantize(copy.deepcopy(model), CONFIG)
    assert type(by_default["one"]) is nn.Linear and by_default["one"].weight is by_default["two"].weight
    asked = lb.quantize(model, lb.LowBitConfig(bits=8, group_size=16, modules={"one": lb.Scheme(8, 16)}))
    assert asked["one"].weight is asked["two"].weight and asked["one"].weight.dtype == torch.int8
    assert asked["one"].weight_scale is asked["two"].weight_scale


def test_hooks_and_references_survive():
    model = perceptron()
    layer, calls = model[0], []
    layer.register_forward_hook(lambda *_: calls.append(1))
    lb.quantize(model, CONFIG)
    assert model[0] is layer
    model(torch.zeros(1, 48))
    assert calls == [1]


def test_mode_and_frozen_biases_survive():
    model = perceptron().train()
    model[0].bias.requires_grad_(False)
    lb.quantize(model, CONFIG)
    assert model.training and not model[0].bias.requires_grad and model[3].weight.requires_grad


def test_fresh_model_from_a_config(tmp_path):
    torch.manual_seed(0)
    model = lb.quantize(AutoModelForCausalLM.from_config(LlamaConfig(**DECODER)).eval(), CONFIG)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(BY_ID["llama"](reloaded), BY_ID["llama"](model))
    dense = model.dequantize()
    assert not any(isinstance(module, LowBitModule) for module in dense.modules())
    assert (BY_ID["llama"](dense) - BY_ID["llama"](reloaded)).norm() <= 1e-5 * BY_ID["llama"](dense).norm()


def test_the_config_a_model_was_built_from_stays_as_it_was(tmp_path):
    config = LlamaConfig(**DECODER)
    low = lb.quantize(AutoModelForCausalLM.from_config(config), CONFIG)
    assert not hasattr(config, "quantization_config") and hasattr(low.config, "quantization_config")
    assert low.model.config is low.config and low.model.layers[0].self_attn.config is low.config
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=lb.LowBitConfig(bits=4, group_size=16))
    assert lb.report(other).lowbit_parameters > 0


def test_dict_config():
    model = lb.quantize(perceptron(), {"bits": 4, "group_size": 16, "modules": {"0": {"bits": 8}}})
    assert model[0].lowbit["weight"].scheme.bits == 8 and model[2].lowbit["weight"].scheme.bits == 4


@pytest.mark.parametrize("change", ["to", "type", "half"])
def test_dtype_changes_leave_codes_alone(change):
    model = lb.quantize(perceptron(), lb.LowBitConfig(bits=3, group_size=None))
    before = {name: tensor.clone() for name, tensor in model[0].state_dict().items() if name != "bias"}
    {"to": lambda: model.to(torch.float16), "type": lambda: model.type(torch.float16), "half": model.half}[change]()
    after = model[0].state_dict()
    assert after["bias"].dtype == torch.float16
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor)


def test_meta_weights_are_refused():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**DECODER))
    with pytest.raises(ValueError, match="`model.embed_tokens.weight` is on the meta device"):
        lb.quantize(model, CONFIG)


def test_second_time_is_refused():
    model = lb.quantize(perceptron(), CONFIG)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="already low-bit"):
        lb.quantize(model, CONFIG)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        pytest.param("gpt2", CONFIG, "`model` must be a torch module, got str", id="name-instead-of-a-model"),
        pytest.param(nn.Linear(8, 8), 4, "`config` must be a LowBitConfig or a dict.*got int", id="bits-as-config"),
        pytest.param(nn.Linear(8, 8), None, "`config` must be a LowBitConfig.*got NoneType", id="no-config"),
        pytest.param(nn.Linear(8, 8), {"bit": 4}, "no field `bit`; did you mean `bits`", id="misspelled-field"),
    ],
)
def test_wrong_types(model, config, message):
    with pytest.raises(TypeError, match=message):
        lb.quantize(model, config)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: nn.Sequential(), id="empty"),
        pytest.param(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), id="convolutions"),
        pytest.param(lambda: nn.Sequential(nn.Linear(0, 8)), id="no-inputs"),
        pytest.param(lambda: nn.Sequential(nn.Embedding(8, 8)), id="table-nobody-asked-for"),
        pytest.param(lambda: nn.Linear(8, 8).requires_grad_(False).type(torch.int8), id="integers"),
    ],
)
def test_nothing_to_convert(make):
    with pytest.raises(ValueError, match="nothing"):
        lb.quantize(make(), CONFIG)
