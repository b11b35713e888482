"""`hf-lowbit export` from the command line."""

import pytest
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.cli import main
from tests.assets import tiny_llama  # noqa: F401


@pytest.fixture
def folder(tiny_llama, tmp_path):  # noqa: F811
    config = lb.LowBitConfig(bits=4, group_size=32)
    AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=config).save_pretrained(tmp_path / "lowbit")
    return tmp_path / "lowbit"


def test_it_writes_and_prints_what(folder, tmp_path, capsys):
    assert main(["export", str(folder), str(tmp_path / "out"), "--format", "compressed-tensors"]) == 0
    assert "14 modules as int4" in capsys.readouterr().out
    assert (tmp_path / "out/model.safetensors").is_file()


def test_a_refusal_is_one_sentence_and_a_status(folder, tmp_path, capsys):
    assert main(["export", str(folder), str(tmp_path / "out"), "--format", "gemma"]) == 1
    printed = capsys.readouterr()
    assert "\nhf-lowbit export: `format`='gemma' can't hold this model" in printed.err and not printed.out
