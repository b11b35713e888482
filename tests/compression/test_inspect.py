"""`inspect`: from a model or from its config alone, the sizes that conversion then produces, and what stays dense."""

import json

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import hf_lowbit as lb
from hf_lowbit.configs.scheme import BITS
from tests.quantizers.architectures import BY_ID, RESNET


ROWS = ["llama", "llama-tied", "gpt2", "bloom", "mixtral", "gpt-oss", "mamba", "t5-gated", "bart", "whisper",
        "bert-classifier", "distilbert", "vit", "clip", "siglip-vision", "llava"]  # fmt: skip


def after_conversion(row_id, bits, group_size):
    model = lb.quantize(BY_ID[row_id].build(), {"bits": bits, "group_size": group_size})
    return lb.report(model)


@pytest.mark.parametrize("row_id", ROWS)
def test_sizes_are_those_of_the_converted_model(row_id):
    inspection = lb.inspect(BY_ID[row_id].build(), group_size=24)
    report = after_conversion(row_id, 3, 24)
    assert inspection.total_parameters == report.total_parameters
    assert inspection.convertible_parameters == report.lowbit_parameters
    assert inspection.bytes_at["3"] == report.total_bytes
    sizes = {f"{m.name}.weight": m.bytes_at["3"] for m in inspection.modules if m.convertible}
    sizes = {name.removesuffix(".weight") if ".experts." in name else name: size for name, size in sizes.items()}
    assert sizes == {row.name: row.bytes for row in report.modules if row.scheme is not None}


@pytest.mark.parametrize("group_size", [32, None, "tensor"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("row_id", ["gpt2", "gpt-oss"])
def test_sizes_at_every_width_and_scope(row_id, bits, group_size):
    inspection = lb.inspect(BY_ID[row_id].build(), group_size=group_size)
    assert inspection.group_size == group_size
    assert inspection.bytes_at[str(bits)] == after_conversion(row_id, bits, group_size).total_bytes


@pytest.mark.parametrize("row_id", ROWS)
def test_a_folder_is_inspected_without_weights(row_id, tmp_path):
    """Only config.json lies there: nothing could be loaded."""
    model = BY_ID[row_id].build()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    found, expected = lb.inspect(tmp_path), lb.inspect(model)
    assert found.model == str(tmp_path) and expected.model == type(model).__name__
    assert {**found.to_dict(), "model": ""} == {**expected.to_dict(), "model": ""}
    assert lb.inspect(str(tmp_path)) == found


def test_a_config_without_an_architecture_gives_the_base_model(tmp_path):
    BY_ID["llama"].build().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("architectures", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "lm_head" not in {m.name for m in lb.inspect(tmp_path).modules}


def test_the_dtype_of_the_config_counts(tmp_path):
    model = BY_ID["llama"].build().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert lb.inspect(tmp_path).dense_bytes == lb.inspect(model).dense_bytes == 2 * model.num_parameters()


@pytest.mark.parametrize("row_id", ["gpt2", "mixtral", "llama-tied"])
def test_inspecting_changes_nothing(row_id):
    model = BY_ID[row_id].build()
    before = ([type(m) for m in model.modules()], {n: p.clone() for n, p in model.named_parameters()})
    lb.inspect(model)
    assert [type(m) for m in model.modules()] == before[0]
    assert all(torch.equal(before[1][n], p) for n, p in model.named_parameters())


@pytest.mark.parametrize("row_id", ROWS)
def test_it_is_json_and_prints(row_id):
    inspection = lb.inspect(BY_ID[row_id].build())
    data = json.loads(json.dumps(inspection.to_dict()))
    assert data["bytes_at"].keys() == {str(bits) for bits in BITS}
    text = str(inspection)
    assert all(m.name in text for m in inspection.modules)
    share = 100 * inspection.convertible_parameters / inspection.total_parameters
    assert f"{share:.1f} % convertible" in text


def test_what_stays_dense_says_why():
    reasons = {m.name: m.reason for m in lb.inspect(BY_ID["mamba"].build()).modules if not m.convertible}
    assert reasons["backbone.layers.0.mixer.dt_proj"] == "its weight is read directly by MambaMixer"
    assert reasons["backbone.layers.0.mixer.conv1d.weight"] == "no low-bit form in Conv1d"
    tied = {m.name: m.reason for m in lb.inspect(BY_ID["llama-tied"].build()).modules}
    assert tied["model.embed_tokens"] == "tied to `lm_head.weight`" and "lm_head" not in tied
    # a table has sizes all the same: `modules` can ask for it
    table = next(m for m in lb.inspect(BY_ID["llama"].build()).modules if m.kind == "embedding")
    assert not table.convertible and table.bytes_at["8"] > 0


def test_nothing_convertible_is_a_finding():
    inspection = lb.inspect(nn.ModuleDict({"gate": nn.Linear(8, 2, bias=False), "table": nn.Embedding(4, 8)}))
    assert [(m.name, m.kind, m.convertible, m.reason) for m in inspection.modules] == [
        ("gate", "linear", False, "router"),
        ("table", "embedding", False, "embeddings are converted only when `modules` names them"),
    ]
    assert inspection.bytes_at == dict.fromkeys(map(str, BITS), inspection.dense_bytes)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        pytest.param(ResNetForImageClassification(ResNetConfig(**RESNET)), "0.0 % convertible", id="convolutions"),
        pytest.param(nn.Sequential(), "0.0 % convertible", id="empty"),
        pytest.param(nn.ParameterList([torch.ones(2, 3)]), "no low-bit form in ParameterList", id="list"),
        pytest.param(nn.MultiheadAttention(8, 2), "its weight is read directly by MultiheadAttention", id="attention"),
    ],
)
def test_odd_models_print(model, line):
    inspection = lb.inspect(model)
    assert line in str(inspection)
    assert inspection.total_parameters == sum(p.numel() for p in model.parameters())
    json.dumps(inspection.to_dict())


def test_a_low_bit_model_is_shown_as_it_is():
    model = lb.quantize(BY_ID["mixtral"].build(), {"bits": 4, "group_size": 32})
    inspection, report = lb.inspect(model), lb.report(model)
    assert inspection.total_parameters == report.total_parameters
    assert inspection.dense_bytes == report.total_bytes
    assert inspection.convertible_parameters == 0
    reasons = {m.name: m.reason for m in inspection.modules}
    assert reasons["model.layers.0.self_attn.q_proj"] == "already low-bit (4)"
    assert reasons["model.layers.0.mlp.experts.down_proj"] == "already low-bit (4)"


def test_a_low_bit_folder_says_what_to_do(tmp_path):
    lb.quantize(BY_ID["llama"].build(), {"bits": 4}).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"is already quantized; load it with from_pretrained and print hf_lowbit.report"
    ):
        lb.inspect(tmp_path)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match="is no folder; pass a checkpoint's folder, a Hub id or a model"):
        lb.inspect(tmp_path / "nowhere")
    with pytest.raises(OSError):
        lb.inspect("./nowhere")


@pytest.mark.parametrize(
    "model", [None, 3, torch.ones(2), lb.LowBitConfig()], ids=["none", "number", "tensor", "config"]
)
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=f"must be a model, a model id or a folder, got {type(model).__name__}"):
        lb.inspect(model)


@pytest.mark.parametrize("group_size", [0, -4, "row", 3.5])
def test_a_wrong_group_size_is_refused(group_size):
    with pytest.raises((TypeError, ValueError), match="`group_size`="):
        lb.inspect(nn.Linear(4, 4), group_size=group_size)


def test_a_folder_with_code_of_its_own_is_never_asked_about(tmp_path, monkeypatch):
    """No prompt: a call that waits for an answer hangs a script."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run code"))
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise RuntimeError('run')")
    for call in (lb.inspect, lambda folder: lb.compress(folder, bits=4)):
        with pytest.raises(ValueError, match="comes with code of its own.*pass the model"):
            call(tmp_path)
