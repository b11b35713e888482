"""`save_pretrained` leaves a card: metadata of the base, no path of this machine, and a written README keeps its text.

Public reports: huggingface/hub-docs#1254, Blaizzy/mlx-vlm#853, ggml-org/llama.cpp#8769,
huggingface/transformers#33922.
"""

import shutil

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

import hf_lowbit as lb


CONFIGS = {
    "low-bit": lambda: lb.LowBitConfig(bits=4, group_size=32),
    "direct": lambda: lb.DQTConfig(bits=8, forward_bits="ternary"),
    "sparse": lambda: lb.BlastConfig(sparsity=0.5, block_size=16),
}
BASE = "---\nlicense: mit\nlanguage: [en, de]\n---\n# Base\n"


@pytest.fixture
def base(dense_folder, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(dense_folder, folder)
    (folder / "README.md").write_text(BASE)
    return folder


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_saved_folder_has_a_card(kind, base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=CONFIGS[kind]())
    model.save_pretrained(tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    data = ModelCard(text).data.to_dict()
    assert (data["license"], data["language"]) == ("mit", ["en", "de"])
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert "hf_lowbit" in data["tags"] and "base_model" not in data
    assert str(tmp_path) not in text


def test_a_base_of_the_hub_is_linked(hub, base, tmp_path):
    hub.add_repo("org/base", {path.name: path.read_bytes() for path in base.iterdir()})
    model = AutoModelForCausalLM.from_pretrained("org/base", quantization_config=CONFIGS["low-bit"]())
    model.save_pretrained(tmp_path / "out")
    data = ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    assert (data["base_model"], data["base_model_relation"]) == ("org/base", "quantized")


def test_what_a_person_wrote_stays(base, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("---\nlicense: apache-2.0\n---\nMine.\n")
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=CONFIGS["low-bit"]())
    model.save_pretrained(out)
    card = ModelCard.load(out / "README.md")
    assert card.text.strip() == "Mine." and card.data["license"] == "apache-2.0" and "4-bit" in card.data["tags"]


def test_a_readme_that_cannot_be_read_does_not_stop_saving(base, tmp_path, caplog):
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("---\nlicense: [\n---\nMine.\n")
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=CONFIGS["low-bit"]())
    model.save_pretrained(out)
    assert "no model card was written" in caplog.text
    assert (out / "model.safetensors").is_file() and (out / "README.md").read_text().endswith("Mine.\n")


def test_dense_models_are_saved_as_ever(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=CONFIGS["low-bit"]())
    for dense in (AutoModelForCausalLM.from_pretrained(base), model.dequantize()):
        dense.save_pretrained(tmp_path / "dense")
        assert not (tmp_path / "dense" / "README.md").exists()
