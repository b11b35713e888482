"""`hf_lowbit.export`: what it refuses before it writes, and that it never leaves a part behind."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_lowbit as lb


def test_an_unknown_format_names_the_known_ones(make, tmp_path):
    with pytest.raises(ValueError, match="'onnx' is unknown.*compressed-tensors.*gguf.*gemma.*bitnet"):
        lb.export(make(bits=4, group_size=32), tmp_path / "out", "onnx")


def test_unknown_activations_are_refused(make, tmp_path):
    with pytest.raises(ValueError, match="`activations`='int4'"):
        lb.export(make(bits=4, group_size=32), tmp_path / "out", "gemma", activations="int4")


def test_a_folder_that_holds_something_is_left_alone(make, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        lb.export(make(bits=4, group_size=32), tmp_path, "compressed-tensors")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_dense_model_is_refused(tiny_llama, tmp_path):
    with pytest.raises(ValueError, match="no low-bit weights to export; compress it first"):
        lb.export(AutoModelForCausalLM.from_pretrained(tiny_llama), tmp_path / "out", "gguf")
    with pytest.raises(ValueError, match="no low-bit weights"):
        lb.export(tiny_llama, tmp_path / "out", "gguf")


def test_a_plain_module_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`model_or_dir` is a Linear"):
        lb.export(torch.nn.Linear(4, 4), tmp_path / "out", "gemma")


def test_adapters_are_merged_first(make, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make(bits=4, group_size=32), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        lb.export(model, tmp_path / "out", "compressed-tensors")


def test_trainable_weights_are_frozen_first_and_those_of_a_folder_are(tiny_llama, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=lb.DQTConfig(bits=8, group_size=32))
    with pytest.raises(ValueError, match=r"hf_lowbit\.freeze\(model\) first"):
        lb.export(model, tmp_path / "out", "compressed-tensors")
    model.save_pretrained(tmp_path / "trained")
    result = lb.export(tmp_path / "trained", tmp_path / "out", "compressed-tensors")
    assert set(result.stored.values()) == {"int8"}


def test_fused_experts_are_refused_with_the_remedy(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(**sizes, vocab_size=64, num_hidden_layers=1, num_local_experts=2)
    model = lb.quantize(MixtralForCausalLM(config), lb.LowBitConfig(bits=4, group_size=32))
    with pytest.raises(ValueError, match="experts.*no export writes fused experts; keep them dense"):
        lb.export(model, tmp_path / "out", "compressed-tensors")


@pytest.mark.parametrize("format", ["compressed-tensors", "gemma"])
def test_int8_activations_are_refused_unless_float_ones_are_asked_for(make, tmp_path, format):
    model = make(bits="ternary", group_size=None)
    with pytest.raises(ValueError, match="activations='float'") as caught:
        lb.export(model, tmp_path / "out", format)
    # the first module of fourteen, and its scheme
    assert "q_proj` and 13 more (Scheme(bits='ternary'" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert lb.export(model, tmp_path / "out", format, activations="float").exact


def test_a_write_that_fails_leaves_nothing(make, tmp_path, monkeypatch):
    from hf_lowbit.exports import folder

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(folder, "save_torch_state_dict", full)
    with pytest.raises(OSError, match="No space left"):
        lb.export(make(bits=4, group_size=32), tmp_path / "out", "compressed-tensors")
    assert list(tmp_path.iterdir()) == []


def test_the_model_is_not_changed(make, tmp_path):
    model = make(bits=4, group_size=32)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    lb.export(model, tmp_path / "out", "compressed-tensors")
    assert model.config.to_dict() == config
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_folder_brings_tokenizer_and_generation_config_and_no_path_of_ours(make, tiny_llama, tmp_path):
    model = make(bits=4, group_size=32)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "lowbit")
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path / "lowbit")
    lb.export(tmp_path / "lowbit", tmp_path / "out", "compressed-tensors")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["max_new_tokens"] == 7
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.architectures == ["LlamaForCausalLM"] and config.dtype == torch.float32
    assert not any(str(tmp_path) in path.read_text() for path in (tmp_path / "out").glob("*.json"))


def test_what_is_printed_says_size_forms_and_what_is_only_close(make, tmp_path):
    result = lb.export(make(bits=4, group_size=None, dtype=torch.bfloat16), tmp_path / "out", "compressed-tensors")
    assert not result.exact
    assert "14 modules as int4" in str(result) and "scales rounded to bfloat16" in str(result)


def test_shards(make, tmp_path):
    lb.export(make(bits=4, group_size=32), tmp_path / "out", "compressed-tensors", max_shard_size="100KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
