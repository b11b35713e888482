"""The card of a compressed model: quality per stage, plan, bytes and time from report.json, and nothing private."""

import json
import shutil

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.cli import main
from hf_lowbit.hub import render_card


DATA = torch.randint(0, 96, (8, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def run(dense_folder, tmp_path_factory):
    """(folder, result) of a run through all stages, with a plan."""
    folder = tmp_path_factory.mktemp("private-place") / "out"
    model = AutoModelForCausalLM.from_pretrained(dense_folder)
    return folder, lb.compress(model, folder, bits=4.5, calibration=DATA, evaluation=DATA)


@pytest.fixture
def folder(run, tmp_path):
    return shutil.copytree(run[0], tmp_path / "out")


def metadata(card):
    return yaml.safe_load(str(card).split("---\n")[1])


def test_quality_of_every_stage_is_shown(run):
    folder, result = run
    text = render_card(folder, online=False).text
    assert "No quality was measured" not in text and "## How it was compressed" in text
    for name in ("dense model", "layer by layer", "block by block", "as a whole"):
        assert f"| {name} |" in text
    for stage in result.stages.values():
        assert f"{stage['value']:.4g}" in text
    assert "windows of 512 tokens that do not overlap" in text and "token ids" in text
    assert "Calibrated on 6 rows (240 tokens) of token ids, 2 more held out" in text
    assert "`model.layers.*.mlp.down_proj`" in text and "gptq" in text


def test_the_index_holds_the_last_stages_figure(run):
    folder, result = run
    entry = metadata(render_card(folder, online=False))["model-index"][0]["results"][0]
    assert entry["metrics"][0]["type"] == "perplexity"
    assert entry["metrics"][0]["value"] == pytest.approx(result.stages["global"]["value"])
    assert entry["dataset"]["name"] == "token ids" and entry["task"]["type"] == "text-generation"


def test_no_path_of_this_machine_leaks(run, dense_folder, tmp_path, capsys):
    shutil.copytree(dense_folder, tmp_path / "dense")
    out = tmp_path / "out"
    assert main(["compress", str(tmp_path / "dense"), str(out), "--bits", "4", "--stages", "layer"]) == 0
    card = (out / "README.md").read_text()
    assert str(tmp_path) not in card and "private-place" not in card
    assert str(tmp_path) not in (out / "report.json").read_text()
    assert "No quality was measured" in card and "No calibration data was used." in card
    # text that a person wrote stays when the run goes on
    (out / "README.md").write_text("# mine\n")
    lb.compress(tmp_path / "dense", out, bits=4, stages=("layer",), resume=False)
    assert (out / "README.md").read_text().endswith("---\n# mine\n")


def test_a_files_name_is_told_without_its_folder():
    from hf_lowbit.pipeline.records import name_of

    assert name_of("/home/me/secret/my_eval.txt") == "my_eval"
    assert name_of(["a", "b"]) == "2 texts passed in memory" and name_of(DATA) == "token ids"


def test_a_report_of_another_checkpoint_is_not_shown(folder):
    config = json.loads((folder / "config.json").read_text())
    report = json.loads((folder / "report.json").read_text())
    report["modules_digest"] = "0" * 16
    (folder / "report.json").write_text(json.dumps(report))
    assert config["quantization_config"]["modules_digest"] != report["modules_digest"]
    assert "No quality was measured" in render_card(folder, online=False).text


def test_after_training_in_the_folder_the_old_figures_are_gone(folder):
    (folder / "training_args.bin").write_bytes(b"")
    assert "How it was compressed" not in render_card(folder, online=False).text


def test_what_is_not_finite_is_not_a_result(folder):
    report = json.loads((folder / "report.json").read_text())
    report["stages"]["global"]["value"] = float("inf")
    (folder / "report.json").write_text(json.dumps(report))
    card = render_card(folder, online=False)
    assert "not finite" in card.text and "model-index" not in metadata(card)


def test_hostile_text_in_a_report_is_text(folder):
    report = json.loads((folder / "report.json").read_text())
    report["protocol"]["evaluation"]["data"] = "<script>|x|\n# big"
    report["stages"]["layer"]["modules"][0]["name"] = "[a](http://b)|"
    (folder / "report.json").write_text(json.dumps(report))
    text = render_card(folder, online=False).text
    assert "<script>" not in text and "\n# big" not in text and "[a](http" not in text


@pytest.mark.parametrize(
    "content", ["{}", '{"stages": 3}', '{"stages": {"layer": {}}}', '{"stages": {}, "report": {}}']
)
def test_a_report_that_is_none_is_not_read(folder, content):
    (folder / "report.json").write_text(content)
    assert "No quality was measured" in render_card(folder, online=False).text


def test_the_report_may_be_passed_for_a_model_in_memory(run):
    folder, result = run
    report = json.loads((folder / "report.json").read_text())
    assert "## How it was compressed" in render_card(result.model, report=report, online=False).text
