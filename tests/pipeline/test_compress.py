"""`compress`: stages, budgets, plans, resuming, and what it must not do to its caller.

Public reports of side effects: NVIDIA/Model-Optimizer#1501, huggingface/optimum-amd#83, Xilinx/brevitas#459.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_lowbit as lb
from hf_lowbit.cli import main
from hf_lowbit.pipeline.store import STATE, alone


def llama(tied=True):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(3)
    return model


DATA = torch.randint(0, 96, (8, 40), generator=torch.Generator().manual_seed(0))


def size(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run through all stages."""
    folder = tmp_path_factory.mktemp("run") / "out"
    model = llama()
    return model, lb.compress(model, folder, bits=3, calibration=DATA, evaluation=DATA), folder


def test_every_stage_is_recorded_and_the_checkpoint_is_the_model(whole):
    _, result, folder = whole
    assert list(result.stages) == ["dense", "layer", "block", "global"]
    assert all(s["metric"] == "perplexity" and s["value"] > 1 for s in result.stages.values())
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(loaded(DATA).logits, result.model(DATA).logits)
    assert "global" in str(result) and "perplexity" in str(result)
    written = json.loads((folder / "report.json").read_text())
    assert list(written["stages"]) == list(result.stages)
    assert not [p for p in folder.parent.iterdir() if p.name.endswith((".new", ".old"))]


def test_refinement_never_gets_worse_on_what_is_held_out(whole):
    stages = whole[1].stages
    assert all(b["after"] < b["before"] for b in stages["block"]["blocks"] if b["kept"])
    distilled = stages["global"]["distillation"]
    assert distilled["after"] <= distilled["before"]


def test_the_callers_model_and_random_state_are_as_before():
    model, before = llama(), llama().state_dict()
    state = torch.get_rng_state()
    lb.compress(model, bits=4, calibration=DATA)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not hasattr(model, "hf_quantizer") and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("data", [None, DATA], ids=["no data", "data"])
@pytest.mark.parametrize("budget", ["22%", "15%"])
def test_a_budget_is_kept_and_used(budget, data, tied, tmp_path):
    model = llama(tied)
    wanted = int(budget[:-1]) / 100 * size(model)
    result = lb.compress(model, tmp_path / "out", budget=budget, calibration=data, stages=("layer",))
    assert 0.9 * wanted < size(result.model) <= wanted
    saved = (tmp_path / "out" / "model.safetensors").stat().st_size
    # names and shapes are a large share of so small a file
    assert abs(saved - size(result.model)) < 8000
    assert "model.embed_tokens" in result.plan.modules and len(result.plan.modules) >= 15


def test_an_average_counts_scales():
    result = lb.compress(llama(), bits=3.5, calibration=DATA, stages=("layer",))
    assert 3.3 < result.report.bits_per_weight <= 3.5
    assert "model.embed_tokens" not in result.plan.modules


def test_without_bits_and_budget_this_machines_memory_decides():
    result = lb.compress(llama(), stages=("layer",))
    assert {s.bits for s in result.plan.modules.values()} == {8}


def test_resuming_gives_the_same_and_does_not_repeat(whole, tmp_path):
    model, result, _ = whole
    folder = tmp_path / "out"
    lb.compress(model, folder, bits=3, calibration=DATA, evaluation=DATA, stages=("layer", "block"))
    first = json.loads((folder / STATE).read_text())["stages"]
    again = lb.compress(model, folder, bits=3, calibration=DATA, evaluation=DATA)
    assert {name: again.stages[name] for name in first} == first
    ours, theirs = again.model.state_dict(), result.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("changed", ["model", "calibration", "settings"])
def test_a_run_of_something_else_is_refused(changed, tmp_path):
    lb.compress(llama(), tmp_path / "out", bits=4, calibration=DATA, stages=("layer",))
    model = llama()
    if changed == "model":
        model.model.norm.weight.data.mul_(1.5)
    data = DATA.flip(0) if changed == "calibration" else DATA
    arguments = {"bits": 3 if changed == "settings" else 4, "calibration": data, "stages": ("layer",)}
    with pytest.raises(ValueError, match=f"another {changed}"):
        lb.compress(model, tmp_path / "out", **arguments)
    lb.compress(model, tmp_path / "out", **arguments, resume=False)


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="something else"):
        lb.compress(llama(), folder, bits=4)
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]


def test_two_runs_into_one_folder(tmp_path):
    with alone(tmp_path / "out"), pytest.raises(RuntimeError, match="another run"):
        lb.compress(llama(), tmp_path / "out", bits=4)


def test_a_run_that_fails_in_saving_leaves_the_former_checkpoint(tmp_path, monkeypatch):
    model, folder = llama(), tmp_path / "out"
    lb.compress(model, folder, bits=4, calibration=DATA, stages=("layer",))
    before = (folder / "model.safetensors").read_bytes()

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(OSError, match="No space"):
        lb.compress(model, folder, bits=4, calibration=DATA)
    assert (folder / "model.safetensors").read_bytes() == before
    assert list(json.loads((folder / STATE).read_text())["stages"]) == ["dense", "layer"]


def test_a_run_killed_between_two_renames_is_recovered(tmp_path):
    folder = tmp_path / "out"
    lb.compress(llama(), folder, bits=4, calibration=DATA, stages=("layer",))
    folder.rename(tmp_path / ".out.old")
    result = lb.compress(llama(), folder, bits=4, calibration=DATA, stages=("layer",))
    assert folder.is_dir() and not (tmp_path / ".out.old").exists() and "layer" in result.stages


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"bits": 4, "budget": "1MB"}, "both say how large"),
        ({"bits": 5}, "`bits`=5"),
        ({"bits": 1.2}, "`bits`=1.2"),
        ({"bits": 2.05}, "impossible: with scales in groups of 64 the smallest plan has"),
        ({"budget": "1%"}, "impossible: the smallest plan takes"),
        ({"bits": 4, "stages": ("block",)}, "must begin with"),
        ({"bits": 4, "stages": ("layer", "global", "block")}, "keep the order"),
        ({"bits": 4, "calibration": []}, "empty"),
        ({"bits": 4, "calibration": torch.zeros(1, 3, dtype=torch.long)}, "tokens"),
        ({"bits": 4, "calibration": DATA + 50}, "vocabulary"),
        ({"bits": 4, "calibration": ["a text"]}, "tokenizer"),
        ({"bits": 4, "low_memory": True}, "an id or a folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_refused_in_a_sentence(arguments, match):
    with pytest.raises(ValueError, match=match):
        lb.compress(llama(), **arguments)


def test_a_model_that_is_quantized_already():
    model = lb.quantize(llama(), lb.LowBitConfig(bits=4, group_size=32))
    with pytest.raises(ValueError, match="quantized already"):
        lb.compress(model, bits=4)
    with pytest.raises(TypeError, match="model_or_id"):
        lb.compress(3, bits=4)


def test_one_row_of_data_leaves_refinement_out_and_says_so():
    result = lb.compress(llama(), bits=4, calibration=DATA[:1])
    assert list(result.stages) == ["dense", "layer"] and any("left out" in note for note in result.notes)


def test_a_stage_before_one_that_is_done_is_refused(tmp_path):
    lb.compress(llama(), tmp_path / "out", bits=4, calibration=DATA, stages=("layer", "global"))
    with pytest.raises(ValueError, match="'block' comes before it"):
        lb.compress(llama(), tmp_path / "out", bits=4, calibration=DATA)


def test_low_memory_is_like_the_other_road(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    given = {"bits": 4, "stages": ("layer",), "evaluation": DATA}
    low = lb.compress(tmp_path / "dense", tmp_path / "low", **given, low_memory=True)
    other = lb.compress(tmp_path / "dense", **given)
    assert low.stages["layer"]["value"] == other.stages["layer"]["value"]
    ours, theirs = low.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = lb.compress(tmp_path / "dense", tmp_path / "low", **given, low_memory=True)
    assert again.stages == low.stages
    with pytest.raises(ValueError, match="another settings"):
        lb.compress(tmp_path / "dense", tmp_path / "low", **{**given, "bits": 3}, low_memory=True)


def test_a_model_that_was_low_bit_once(tmp_path):
    model = lb.quantize(llama(), lb.LowBitConfig(bits=8, group_size=None)).dequantize()
    assert lb.compress(model, bits=4, stages=("layer",)).report.bits_per_weight < 5


def test_masked_models_are_scored_by_masked_tokens(tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    with pytest.raises(ValueError, match="no tokenizer's mask"):
        lb.compress(BertForMaskedLM(config), bits=4, evaluation=DATA)
    labels = {"input_ids": DATA, "labels": DATA.masked_fill(torch.arange(40) % 7 > 0, -100)}
    result = lb.compress(BertForMaskedLM(config), bits=4, calibration=DATA, evaluation=[labels])
    assert list(result.stages) == ["dense", "layer", "block", "global"]


def test_images_in_another_dtype_than_the_model():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16,
                       patch_size=8, num_labels=3)  # fmt: skip
    model = ViTForImageClassification(config).to(torch.bfloat16)
    images = [{"pixel_values": torch.randn(1, 3, 16, 16)} for _ in range(4)]
    scored = [{**images[0], "labels": torch.tensor([1])}]
    result = lb.compress(model, budget="60%", calibration=images, evaluation=scored)
    assert list(result.stages) == ["dense", "layer", "block", "global"]
    with pytest.raises(ValueError, match="without `labels`"):
        lb.compress(model, bits=4, calibration=images, evaluation=images)


def test_low_memory_and_the_command_line(tmp_path, capsys):
    llama().save_pretrained(tmp_path / "dense")
    result = lb.compress(tmp_path / "dense", tmp_path / "low", bits=4, stages=("layer",), low_memory=True)
    assert result.report.bits_per_weight < 5
    assert main(["compress", str(tmp_path / "dense"), str(tmp_path / "out"), "--budget", "30%"]) == 0
    assert "layer" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").hf_quantizer is not None
    assert main(["compress", str(tmp_path / "out"), str(tmp_path / "other"), "--bits", "4"]) == 1
    assert "already quantized" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
def test_killed_after_the_first_stage_what_is_there_loads_and_goes_on(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    torch.save(DATA, tmp_path / "data.pt")
    code = (
        "import torch, hf_lowbit as lb; "
        f"lb.compress({str(tmp_path / 'dense')!r}, {str(tmp_path / 'out')!r}, bits=4, "
        f"calibration=torch.load({str(tmp_path / 'data.pt')!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / "out").exists():
        pass
    process.kill()
    process.wait()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").hf_quantizer is not None
    result = lb.compress(tmp_path / "dense", tmp_path / "out", bits=4, calibration=DATA)
    assert list(result.stages) == ["dense", "layer", "block", "global"]
