"""Cards state facts: base and licence as far as known, what was converted, measured bytes, results if any.

Public reports: huggingface/hub-docs#1254, Blaizzy/mlx-vlm#853, ggml-org/llama.cpp#8769,
huggingface/transformers#33922.
"""

import json
import re
import shutil

import pytest
import yaml
from huggingface_hub import EvalResult
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import hf_lowbit as lb
from hf_lowbit.hub import markdown, render_card, task, write_card_beside


BASE_README = "---\nlicense: apache-2.0\nlanguage:\n- en\n- de\npipeline_tag: text-generation\n---\n# The base\n"


def metadata(card):
    """The YAML block, parsed without the library that wrote it."""
    block = re.match(r"---\n(.*?)\n---\n", str(card), re.DOTALL)[1]
    return yaml.safe_load(block)


def quantized(folder):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=lb.LowBitConfig(bits=4, group_size=32))


@pytest.fixture
def base_folder(dense_folder, tmp_path):
    """A copy of the dense model to which a test may add files."""
    return shutil.copytree(dense_folder, tmp_path / "secret-base")


def test_metadata_with_a_hub_id_as_base(lowbit):
    data = metadata(render_card(lowbit, base_model="org/base-135m", base_card=BASE_README))
    assert data == {
        "base_model": "org/base-135m",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "language": ["en", "de"],
        "tags": ["low-bit", "quantized", "4-bit", "hf_lowbit"],
    }


def test_a_local_base_is_not_named(hub, lowbit, dense_folder):
    card = render_card(lowbit)
    assert "base_model" not in metadata(card) and "base_model_relation" not in metadata(card)
    assert "from a local folder" in card.text
    assert str(dense_folder) not in str(card) and "secret" not in str(card) and "private-place" not in str(card)
    assert "license" not in metadata(card) and "No licence was found" in card.text


def test_licence_and_languages_come_from_the_readme_beside_a_local_base(base_folder):
    (base_folder / "README.md").write_text(BASE_README)
    card = render_card(quantized(base_folder), online=False)
    data = metadata(card)
    assert (data["license"], data["language"]) == ("apache-2.0", ["en", "de"])
    assert "base_model" not in data and "No licence" not in card.text


def test_they_come_from_the_hub_for_a_hub_base(hub, lowbit):
    hub.add_repo("org/base", {"README.md": BASE_README.replace("apache-2.0", "mit")})
    assert metadata(render_card(lowbit, base_model="org/base"))["license"] == "mit"
    assert "license" not in metadata(render_card(lowbit, base_model="org/unknown"))


def test_the_hub_id_of_a_loaded_model_is_its_base(hub, dense_folder):
    files = {path.name: path.read_bytes() for path in dense_folder.iterdir()}
    hub.add_repo("org/base", {**files, "README.md": BASE_README})
    data = metadata(render_card(quantized("org/base")))
    assert (data["base_model"], data["license"]) == ("org/base", "apache-2.0")


def test_a_folder_with_a_recorded_hub_id_has_that_base_unless_it_was_trained(base_folder):
    config = json.loads((base_folder / "config.json").read_text())
    (base_folder / "config.json").write_text(json.dumps({**config, "_name_or_path": "org/base"}))
    assert metadata(render_card(quantized(base_folder), online=False))["base_model"] == "org/base"
    (base_folder / "README.md").write_text("---\nbase_model: org/base\n---\nfine-tuned from it")
    assert "base_model" not in metadata(render_card(quantized(base_folder), online=False))
    (base_folder / "README.md").unlink()
    (base_folder / "trainer_state.json").write_text("{}")
    assert "base_model" not in metadata(render_card(quantized(base_folder), online=False))


def test_a_saved_model_remembers_its_base_through_its_card(lowbit, tmp_path):
    lowbit.save_pretrained(tmp_path)
    write_card_beside(tmp_path, lowbit, base_model="org/base", base_card=BASE_README)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for source in (tmp_path, reloaded):
        data = metadata(render_card(source, online=False))
        assert (data["base_model"], data["license"]) == ("org/base", "apache-2.0")


def test_a_folder_and_its_model_give_the_same_numbers(lowbit, tmp_path):
    lowbit.save_pretrained(tmp_path)
    of_model, of_folder = (render_card(it, base_model="org/base", online=False).text for it in (lowbit, tmp_path))
    cut = "## What stayed dense"
    assert of_model.split(cut)[0] == of_folder.split(cut)[0]


def test_sizes_are_those_of_the_file(lowbit, tmp_path):
    lowbit.save_pretrained(tmp_path)
    text = render_card(tmp_path, online=False).text
    stored = (tmp_path / "model.safetensors").stat().st_size
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little") + 8
    assert f"| Size of all tensors | {markdown.size(stored - header)} |" in text
    assert f"| Parameters | {lowbit.num_parameters():,} |" in text


def test_a_report_can_be_passed_as_object_or_dict(lowbit):
    report = lb.report(lowbit)
    cards = [str(render_card(lowbit, "org/base", given, online=False)) for given in (None, report, report.to_dict())]
    assert cards[0] == cards[1] == cards[2]


def test_results_make_a_table_and_a_model_index(lowbit):
    results = [
        {"metric_type": "perplexity", "metric_value": 21.25, "dataset_name": "Austen novels", "baseline": 20,
         "protocol": "1024 tokens of context"},
        EvalResult("text-generation", "org/set", "Set", "accuracy", 0.5),
    ]  # fmt: skip
    card = render_card(lowbit, "org/base", results=results, online=False)
    assert "| Austen novels | perplexity | 21.25 | 20 | 1024 tokens of context |" in card.text
    assert "No quality was measured" not in card.text
    (index,) = metadata(card)["model-index"]
    assert [entry["metrics"][0]["value"] for entry in index["results"]] == [21.25, 0.5]
    assert "model-index" not in metadata(render_card(lowbit, "org/base", online=False))


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        ({"metric_type": "ppl", "metric_value": float("nan"), "dataset_name": "x"}, "finite"),
        ({"metric_type": "ppl", "metric_value": 1.0, "dataset_name": "x", "baseline": "low"}, "finite"),
        ({"metric_type": "ppl", "metric_value": 1.0}, "lacks 'dataset_name'"),
        ({"metric": "ppl", "metric_value": 1.0, "dataset_name": "x"}, "no field 'metric'"),
        (3.5, "is a float"),
    ],
    ids=["nan", "baseline", "missing", "unknown", "type"],
)
def test_bad_results_are_refused_by_name(lowbit, result, complaint):
    with pytest.raises((TypeError, ValueError), match=rf"results\[0\].*{complaint}"):
        render_card(lowbit, "org/base", results=[result], online=False)


HOSTILE_README = """---
license: "mit\\nbase_model: evil/model"
license_name: "<script>alert(1)</script>"
license_link: "javascript:alert(1)"
language: ["en", "de\\n---\\n# injected", 7, {"a": 1}]
pipeline_tag: "x\\ntags: [evil]"
tags: ["<img src=x>"]
base_model: ../../secret
model-index: nonsense
---
# injected heading
"""


def test_hostile_metadata_of_a_base_is_left_out(lowbit):
    card = render_card(lowbit, "org/base", base_card=HOSTILE_README)
    data = metadata(card)
    assert set(data) == {"base_model", "base_model_relation", "library_name", "pipeline_tag", "tags", "language"}
    assert (data["base_model"], data["language"], data["pipeline_tag"]) == ("org/base", ["en"], "text-generation")
    for word in ("evil", "script", "injected", "secret", "img"):
        assert word not in str(card)


BROKEN = {"open": "license: [mit", "list": "- a\n- b", "deep": "[" * 5000, "key": "? {a: b}: c"}


@pytest.mark.parametrize("block", BROKEN.values(), ids=BROKEN)
def test_a_base_card_that_cannot_be_read_is_no_card(lowbit, block):
    card = render_card(lowbit, "org/base", base_card=f"---\n{block}\n---\ntext")
    assert "license" not in metadata(card)


def test_hostile_names_stay_in_their_cell(lowbit):
    report = lb.report(lowbit).to_dict()
    next(entry for entry in report["modules"] if entry["scheme"])["name"] = "a|b`\n# <script>x"
    next(entry for entry in report["modules"] if not entry["scheme"])["reason"] = "see [this](http://evil) | <b>\n# x"
    result = {"metric_type": "p|p\n", "metric_value": 1.0, "dataset_name": "http://evil.example <i>"}
    card = render_card(lowbit, "org/base", report, [result], online=False)
    assert "<script" not in card.text and "<b>" not in card.text and "](http://evil" not in card.text
    assert "http://evil" not in card.text
    rows = [line for line in card.text.splitlines() if line.startswith("|")]
    cells = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert set(cells) == {3, 10, 6, 4}
    assert [line for line in card.text.splitlines() if line.startswith("# ")] == ["# base, 4 bits"]


def test_what_is_not_low_bit_gets_no_card(dense_folder, lowbit, tmp_path):
    with pytest.raises(ValueError, match="not a low-bit model; compress it first"):
        render_card(LlamaForCausalLM.from_pretrained(dense_folder))
    with pytest.raises(ValueError, match="not a low-bit checkpoint"):
        render_card(dense_folder)
    with pytest.raises(FileNotFoundError, match="no config.json"):
        render_card(tmp_path)
    with pytest.raises(ValueError, match="neither an existing folder nor a Hub id"):
        render_card(lowbit, base_model="/no/such/place")


def test_the_index_of_an_earlier_save_is_not_believed(lowbit, tmp_path):
    """A dense, sharded folder that the low-bit model was saved over: transformers takes the shards away only."""
    single = tmp_path / "single"
    lowbit.save_pretrained(single)
    lowbit.save_pretrained(tmp_path, max_shard_size="50KB")
    lowbit.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert str(render_card(tmp_path, online=False)) == str(render_card(single, online=False))


def test_an_index_that_points_outside_is_refused(lowbit, tmp_path):
    lowbit.save_pretrained(tmp_path, max_shard_size="50KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../elsewhere.safetensors")
    path.write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="lacks the weights file"):
        render_card(tmp_path, online=False)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format_version": 99}, "newer than"),
        ({"modules": {"model.layers.0.mlp.up_proj": {"bits": ["a|b"], "shape": [1, 1]}}}, "bits"),
        ({"modules": {"nowhere": {"bits": 4, "shape": [1, 1]}}}, "no safetensors file holds it"),
        ({"modules": {"model.layers.0.mlp.up_proj": {"bits": 4, "shape": "big"}}}, "shape"),
    ],
    ids=["newer", "bits", "missing", "shape"],
)
def test_a_tampered_config_is_an_error_that_names_the_field(lowbit, tmp_path, change, complaint):
    lowbit.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]["modules_digest"]
    config["quantization_config"].update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((TypeError, ValueError), match=complaint):
        render_card(tmp_path, online=False)


def test_truncated_weights_are_an_error(lowbit, tmp_path):
    lowbit.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:100])
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        render_card(tmp_path, online=False)


def test_several_schemes_are_one_row_each(dense_folder):
    config = lb.LowBitConfig(bits="ternary", modules={"mlp": lb.Scheme(8, None)})
    card = render_card(AutoModelForCausalLM.from_pretrained(dense_folder, quantization_config=config), online=False)
    assert "mixed-precision" in metadata(card)["tags"] and "8-bit" not in metadata(card)["tags"]
    assert "| ternary | 128 | no | 8 bits per token | 8 |" in card.text
    assert "| 8 bits | output channel | no | not quantized | 6 |" in card.text


@pytest.mark.parametrize(
    ("architecture", "tag", "loader"),
    [
        ("LlamaForCausalLM", "text-generation", "AutoModelForCausalLM"),
        ("BertForSequenceClassification", "text-classification", "AutoModelForSequenceClassification"),
        ("BertModel", "feature-extraction", "AutoModel"),
        ("ViTModel", "image-feature-extraction", "AutoModel"),
        ("Gemma3ForConditionalGeneration", "image-text-to-text", "AutoModelForImageTextToText"),
        ("BartForConditionalGeneration", "text2text-generation", "AutoModelForSeq2SeqLM"),
        ("WhisperForConditionalGeneration", "automatic-speech-recognition", "AutoModelForSpeechSeq2Seq"),
        ("NobodysModel", None, None),
    ],
)
def test_task_and_loader_come_from_transformers(architecture, tag, loader):
    assert task.describe(architecture) == (tag, loader)


def test_trained_codes_are_not_called_rounded(dense_folder, tmp_path):
    """Neither while they are trained, nor frozen, nor loaded again."""
    config = lb.DQTConfig(bits=8, forward_bits="ternary")
    model = AutoModelForCausalLM.from_pretrained(dense_folder, quantization_config=config)
    cards = [str(render_card(model, online=False))]
    cards.append(str(render_card(lb.freeze(model), online=False)))
    model.save_pretrained(tmp_path / "frozen")
    cards.append(str(render_card(tmp_path / "frozen", online=False)))
    cards.append(str(render_card(AutoModelForCausalLM.from_pretrained(tmp_path / "frozen"), online=False)))
    for card in cards:
        assert "Direct Quantized Training" in card and "round to nearest" not in card
