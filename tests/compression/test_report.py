"""`report`: every parameter once, every byte as it lies in memory, and a reason for what stays dense."""

import copy
import json
import math

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.pytorch_utils import Conv1D

import hf_lowbit as lb
from hf_lowbit.functional.dispatch import choose, use_kernel
from tests.quantizers.architectures import BY_ID, RESNET


ROWS = ["llama", "llama-tied", "gpt2", "opt", "bloom", "gemma3", "mixtral", "gpt-oss", "mamba", "mamba2", "t5-gated",
        "bart", "whisper", "bert-masked-lm", "vit", "clip", "siglip-vision", "llava"]  # fmt: skip
CONFIG = {"bits": 3, "group_size": 24}


@pytest.fixture(scope="module")
def reported():
    """{row: (dense parameters, low-bit model, its report)}, each made once."""
    made = {}

    def get(row_id):
        if row_id not in made:
            model = BY_ID[row_id].build()
            dense = {name: parameter.numel() for name, parameter in model.named_parameters()}
            lb.quantize(model, CONFIG)
            made[row_id] = dense, model, lb.report(model)
        return made[row_id]

    return get


@pytest.mark.parametrize("row_id", ROWS)
def test_every_parameter_is_counted_once(reported, row_id):
    dense, _, report = reported(row_id)
    assert {m.name: m.parameters for m in report.modules} == dense
    assert report.total_parameters == sum(dense.values())
    assert report.lowbit_parameters == sum(m.parameters for m in report.modules if m.scheme is not None)
    assert all(math.prod(m.shape) == m.parameters for m in report.modules)


@pytest.mark.parametrize("row_id", ROWS)
def test_shares_add_up_to_the_whole(reported, row_id):
    table = str(reported(row_id)[2]).splitlines()
    rows = [line.split() for line in table[2:-1]]
    shares = [float(words[words.index("%") - 1]) for words in rows]
    # each is printed with one decimal
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))


@pytest.mark.parametrize("row_id", ROWS)
def test_bytes_are_those_of_the_tensors(reported, row_id):
    _, model, report = reported(row_id)
    assert report.total_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert report.dense_bytes_16bit == 2 * report.total_parameters
    for row in report.modules:
        owner, _, name = row.name.rpartition(".")
        module = model.get_submodule(owner)
        suffixes = module.lowbit[name].tensors() if row.scheme else [""]
        assert row.bytes == sum(module._parameters[name + suffix].nbytes for suffix in suffixes)
        assert row.bits_per_weight == pytest.approx(8 * row.bytes / row.parameters)


@pytest.mark.parametrize(
    ("bits", "group_size", "expected"),
    [
        # docs/format.md, Size: R bytes a row, then scales and zero points
        pytest.param("ternary", None, 96 * (16 + 4), id="ternary-channel"),
        pytest.param(2, 32, 96 * (16 + 2 * 3), id="2-bits-groups-zero-points"),
        pytest.param(3, 24, 96 * (16 + 8 + 3 * 3), id="3-bits-short-group-zero-points"),
        pytest.param(4, 64, 96 * (32 + 2), id="4-bits-groups"),
        pytest.param(4, "tensor", 96 * 32 + 4, id="4-bits-tensor"),
        pytest.param(8, None, 96 * (64 + 4), id="8-bits-channel"),
    ],
)
def test_bytes_are_the_arithmetic_of_the_scheme(bits, group_size, expected):
    model = lb.quantize(nn.Sequential(nn.Linear(64, 96)), {"bits": bits, "group_size": group_size})
    report = lb.report(model)
    weight, bias = report.modules
    assert (weight.bytes, bias.bytes) == (expected, 4 * 96)
    assert (report.lowbit_bytes, report.total_bytes) == (expected, expected + 4 * 96)
    assert report.bits_per_weight == pytest.approx(8 * expected / (64 * 96))


@pytest.mark.parametrize("row_id", ROWS)
def test_it_is_json(reported, row_id):
    report = reported(row_id)[2]
    data = json.loads(json.dumps(report.to_dict()))
    assert data["total_parameters"] == report.total_parameters
    assert data["modules"][0]["shape"] == list(report.modules[0].shape)
    schemes = [row["scheme"] for row in data["modules"] if row["scheme"]]
    assert schemes and {scheme["bits"] for scheme in schemes} == {3}


def test_a_tied_table_is_counted_once_low_bit_too():
    model = BY_ID["llama-tied"].build()
    parameters = model.num_parameters()
    lb.quantize(model, lb.LowBitConfig(modules={"model.embed_tokens": lb.Scheme(8, None)}))
    report = lb.report(model)
    assert report.total_parameters == parameters
    tables = [row for row in report.modules if row.shape == (64, 64) and row.scheme == lb.Scheme(8, None)]
    assert [row.name for row in tables] == ["model.embed_tokens.weight"]
    assert tables[0].kernel == "lookup"


REASONS = {
    "llama": {"lm_head.weight": "output embeddings", "model.norm.weight": "no low-bit form of LlamaRMSNorm",
              "model.embed_tokens.weight": "embeddings are converted only when `modules` names them"},
    "llama-tied": {"model.embed_tokens.weight": "tied weight"},
    "bert-classifier": {"classifier.weight": "task head", "classifier.bias": "bias or other vector"},
    "mamba": {"backbone.layers.0.mixer.dt_proj.weight": "its weight is read directly by MambaMixer",
              "backbone.layers.0.mixer.conv1d.weight": "no low-bit form of Conv1d",
              "backbone.layers.0.mixer.A_log": "no low-bit form of MambaMixer",
              "backbone.layers.0.mixer.D": "bias or other vector"},
    "t5-relu": {"encoder.block.0.layer.1.DenseReluDense.wo.weight": "the model keeps it in float32"},
    "gpt-oss": {"model.layers.0.mlp.experts.gate_up_proj_bias": "bias or other vector",
                "model.layers.0.mlp.router.weight": "no low-bit form of GptOssTopKRouter"},
}  # fmt: skip


@pytest.mark.parametrize("row_id", REASONS)
def test_what_is_dense_says_why(reported, row_id):
    reasons = {row.name: row.reason for row in reported(row_id)[2].modules if row.scheme is None}
    assert {name: reasons[name] for name in REASONS[row_id]} == REASONS[row_id]


def test_what_the_user_skipped_says_so():
    model = BY_ID["mixtral"].build()
    lb.quantize(model, lb.LowBitConfig(modules_to_not_convert=["layers.0", "re:.*down_proj"]))
    reasons = {row.name: row.reason for row in lb.report(model).modules if row.scheme is None}
    assert reasons["model.layers.0.self_attn.q_proj.weight"] == "`modules_to_not_convert` names it ('layers.0')"
    assert reasons["model.layers.1.mlp.experts.down_proj"] == "`modules_to_not_convert` names it ('re:.*down_proj')"


def test_a_dense_model_is_reported_as_such():
    model = nn.ModuleDict({"linear": nn.Linear(4, 4), "conv1d": Conv1D(4, 4)})
    report = lb.report(model)
    assert report.lowbit_parameters == 0 and report.bits_per_weight == 0
    assert {m.name: m.reason for m in report.modules if m.name.endswith("weight")} == {
        "linear.weight": "not converted", "conv1d.weight": "not converted"
    }  # fmt: skip
    assert "0.0 % of 40 parameters are low-bit" in str(report)


def test_dense_experts_are_reported_as_experts():
    reasons = {row.name: row.reason for row in lb.report(BY_ID["mixtral"].build()).modules}
    assert reasons["model.layers.0.mlp.experts.down_proj"] == "not converted"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("row_id", ["llama", "gpt2", "mixtral"])
def test_the_kernel_is_the_one_that_runs(row_id, dtype, monkeypatch):
    model, ran = lb.quantize(BY_ID[row_id].build().to(dtype), {"bits": 4, "group_size": 32}), set()

    def spy(problem):
        choice = choose(problem)
        ran.add((choice.kernel.name, choice.reason))
        return choice

    monkeypatch.setattr("hf_lowbit.functional.linear.choose", spy)
    # calls of earlier tests are remembered
    monkeypatch.setattr("hf_lowbit.functional.dispatch._choices", {})
    with torch.no_grad():
        model(torch.tensor([[3]]))
    assert {(row.kernel, row.reason) for row in lb.report(model).modules if row.scheme} == ran


def test_a_forced_kernel_is_reported(reported):
    with use_kernel("reference"):
        forced = lb.report(reported("llama")[1])
    assert {(row.kernel, row.reason) for row in forced.modules if row.scheme} == {("reference", "forced")}


def test_weights_on_the_meta_device_are_counted(reported):
    # untied: moving to the meta device ends ties in torch
    _, model, report = reported("mixtral")
    twin = lb.report(copy.deepcopy(model).to("meta"))
    assert (twin.total_parameters, twin.total_bytes) == (report.total_parameters, report.total_bytes)
    assert [row.name for row in twin.modules] == [row.name for row in report.modules]


@pytest.mark.parametrize(
    ("model", "line"),
    [
        pytest.param(
            ResNetForImageClassification(ResNetConfig(**RESNET)), "no low-bit form of Conv2d", id="convolutions"
        ),
        pytest.param(nn.Sequential(), "0.0 % of 0 parameters are low-bit", id="empty"),
        pytest.param(nn.ParameterList([torch.ones(2, 3)]), "no low-bit form of ParameterList", id="list"),
        pytest.param(nn.MultiheadAttention(8, 2), "its weight is read directly by MultiheadAttention", id="attention"),
    ],
)
def test_odd_models_print(model, line):
    report = lb.report(model)
    assert line in str(report)
    assert report.total_parameters == sum(p.numel() for p in model.parameters())
    json.dumps(report.to_dict())


@pytest.mark.parametrize(
    "model", ["llama", None, torch.ones(2), lb.LowBitConfig()], ids=["text", "none", "tensor", "config"]
)
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=f"`model` must be a torch module, got {type(model).__name__}"):
        lb.report(model)
