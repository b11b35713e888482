"""What can't be imported stops with a sentence and leaves no folder: foreign methods, tampered and hostile files."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_lowbit as lb
from hf_lowbit.cli import main
from tests.imports import gptq_writer


QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def source(llama, tmp_path):
    gptq_writer.write(tmp_path / "source", llama, bits=4, group_size=32, sym=True)
    return tmp_path / "source"


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def refused(source, tmp_path, match):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=match):
        lb.import_checkpoint(source, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"quant_method": "awq"}, "`quant_method`='awq' of the checkpoint can't be imported; these can"),
        ({"quant_method": "hf_lowbit"}, "low-bit already"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "but has no `weight_packed`"),
        ({"checkpoint_format": "marlin"}, "packed for one kernel"),
        ({"group_size": 48}, "lacks|scales of shape"),
        ({"group_size": "32"}, "is not a whole number"),
        ({"bits": None}, "`bits`=None .* is not a whole number"),
    ],
    ids=["awq", "ours", "no-tensors", "marlin", "groups", "text", "no-bits"],
)
def test_configs(source, tmp_path, fields, match):
    change_config(source, **fields)
    if "group_size" in fields:
        change_tensors(source, lambda tensors: [tensors.pop(n) for n in list(tensors) if n.endswith("g_idx")])
    refused(source, tmp_path, match)


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda t: t.update({f"{QUERY}.scales": -t[f"{QUERY}.scales"]}), "negative or not a number"),
        (lambda t: t[f"{QUERY}.scales"].fill_(float("nan")), "negative or not a number"),
        (lambda t: t.pop(f"{QUERY}.qzeros"), "lacks `qzeros`"),
        (lambda t: t.update({f"{QUERY}.qweight": t[f"{QUERY}.qweight"][:5]}), "does not hold 64 x 64 codes"),
        (lambda t: t.update({f"{QUERY}.scales": t[f"{QUERY}.scales"][:1]}), "has scales of shape"),
        (lambda t: t.update({f"{QUERY}.bias": torch.ones(64)}), "the model's layer has no bias"),
        (lambda t: t.update({"other.qweight": t[f"{QUERY}.qweight"].clone()}), "no linear layer of this name"),
    ],
    ids=["negative", "nan", "no-zeros", "cut", "few-scales", "bias", "stranger"],
)
def test_tampered_tensors(source, tmp_path, change, match):
    change_tensors(source, change)
    refused(source, tmp_path, match)


def test_truncated(source, tmp_path):
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(source, tmp_path, "can't be read")


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was opened')",)


def test_pickles_are_never_opened(source, tmp_path):
    (source / "model.safetensors").unlink()
    with (source / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"weight": Bomb()}, file)
    refused(source, tmp_path, "are pickles, which can run code, and are never opened")


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/x.safetensors", "pytorch_model.bin", "lost.safetensors"]
)
def test_an_index_that_points_elsewhere(source, tmp_path, name):
    (source / "model.safetensors").rename(tmp_path / "secret.safetensors")
    index = {"weight_map": {f"{QUERY}.qweight": name}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(source, tmp_path, "no safetensors file of its own folder|which is missing")


@pytest.mark.parametrize("content", [None, "{", "[]"], ids=["missing", "broken", "list"])
def test_no_config(source, tmp_path, content):
    (source / "config.json").unlink()
    if content is not None:
        (source / "config.json").write_text(content)
    refused(source, tmp_path, "no checkpoint|no JSON|no fields")


def test_a_folder_that_holds_something(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        lb.import_checkpoint(source, tmp_path / "out")


def test_the_command(source, tmp_path, capsys):
    assert main(["import", str(source), str(tmp_path / "out")]) == 0
    assert "7 modules of 4 bits, groups of 32; every code, scale and zero point as it was" in capsys.readouterr().out
    assert main(["import", str(source), str(tmp_path / "out")]) == 1
    assert "hf-lowbit import: `output_dir`" in capsys.readouterr().err
