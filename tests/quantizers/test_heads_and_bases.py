"""A checkpoint of one class loaded as another: base model and head model, a new head, layers the checkpoint lacks."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    FunnelConfig,
    FunnelForMaskedLM,
)

import hf_lowbit as lb
from hf_lowbit.nn.packed import LowBitModule
from tests.quantizers.architectures import BY_ID, IDS


FIELDS = {"bits": 4, "group_size": 32}
# torch's dense product of one row depends on where the weight lies in memory
SAME_NUMBERS = 1e-6
# standard deviation of newly drawn weights: `initializer_range` of the configs, within the scatter of a small sample
DRAWN_STD, SCATTER = 0.02, 0.2


def lowbit_names(model):
    return [name for name, module in model.named_modules() if isinstance(module, LowBitModule)]


def hidden(model):
    with torch.inference_mode():
        return model(input_ids=IDS).last_hidden_state


def prefixed(model):
    return getattr(model, model.base_model_prefix)


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "mixtral", "gpt2", "bert-classifier", "mamba"])
def test_base_model_from_a_head_models_checkpoint(lowbit_folder, architecture):
    whole = BY_ID[architecture].auto.from_pretrained(lowbit_folder(architecture, **FIELDS))
    base = AutoModel.from_pretrained(lowbit_folder(architecture, **FIELDS))
    assert type(base) is type(prefixed(whole))
    assert lowbit_names(base) == lowbit_names(prefixed(whole))
    assert torch.equal(hidden(base), hidden(prefixed(whole)))


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "mixtral", "gpt2", "bert-classifier", "mamba"])
def test_head_model_from_a_base_models_checkpoint(lowbit_folder, architecture, tmp_path):
    base = AutoModel.from_pretrained(lowbit_folder(architecture, **FIELDS))
    base.save_pretrained(tmp_path / "base")
    assert torch.equal(hidden(AutoModel.from_pretrained(tmp_path / "base")), hidden(base))
    whole = BY_ID[architecture].auto.from_pretrained(tmp_path / "base")
    assert lowbit_names(prefixed(whole)) == lowbit_names(base)
    assert torch.equal(hidden(prefixed(whole)), hidden(base))
    # and on: what is saved next names its modules as the head model does
    whole.save_pretrained(tmp_path / "whole")
    again = BY_ID[architecture].auto.from_pretrained(tmp_path / "whole")
    assert torch.equal(BY_ID[architecture](again), BY_ID[architecture](whole))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert-masked-lm"])
@pytest.mark.parametrize("base", ["dense", "low-bit"])
def test_new_classifier_is_dense_and_drawn(lowbit_folder, dense_folder, architecture, base, tmp_path):
    folder = lowbit_folder(architecture, **FIELDS) if base == "low-bit" else dense_folder(architecture)
    fields = {} if base == "low-bit" else {"quantization_config": lb.LowBitConfig(**FIELDS)}
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=50, **fields)
    head = model.score if hasattr(model, "score") else model.classifier
    assert type(head).forward is nn.Linear.forward and not isinstance(head, LowBitModule)
    assert head.weight.std().item() == pytest.approx(DRAWN_STD, rel=SCATTER)
    assert lowbit_names(model)
    with torch.inference_mode():
        logits = model(input_ids=IDS[:1]).logits
    assert torch.isfinite(logits).all()
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    with torch.inference_mode():
        assert (again(input_ids=IDS[:1]).logits - logits).norm() <= SAME_NUMBERS * logits.norm()


def test_layers_that_the_dense_checkpoint_lacks_are_drawn_and_rounded(dense_folder):
    """As transformers does for a dense model: random numbers, never what lay in memory."""
    model = AutoModelForCausalLM.from_pretrained(
        dense_folder("mixtral"), quantization_config=lb.LowBitConfig(bits=8, group_size=32), num_hidden_layers=3
    )
    lowbit = [(m, name) for m in model.model.layers[2].modules() if isinstance(m, LowBitModule) for name in m.lowbit]
    assert len(lowbit) == 6
    for module, name in lowbit:
        assert module.dense_weight(name).std().item() == pytest.approx(DRAWN_STD, rel=SCATTER)
    assert torch.isfinite(BY_ID["mixtral"](model)).all()


def test_bias_that_the_checkpoint_lacks_is_zero(lowbit_folder, tmp_path):
    """As transformers does for a dense model."""
    AutoModelForCausalLM.from_pretrained(lowbit_folder("qwen2", **FIELDS)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.model.layers[1].self_attn.q_proj.bias, torch.zeros(64))


@pytest.mark.parametrize("base", ["dense", "low-bit"])
def test_other_number_of_classes(lowbit_folder, dense_folder, base):
    """Drawn anew, or refused by versions of transformers that can't; never the old classes under new names."""
    folder = lowbit_folder("bert-classifier", **FIELDS) if base == "low-bit" else dense_folder("bert-classifier")
    fields = {} if base == "low-bit" else {"quantization_config": lb.LowBitConfig(**FIELDS)}
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=50, ignore_mismatched_sizes=True, **fields
        )
    except ValueError as error:
        assert "`classifier.weight` is (3, 64), the model's is (50, 64)" in str(error)
    else:
        assert model.classifier.weight.std().item() == pytest.approx(DRAWN_STD, rel=SCATTER)
        assert BY_ID["bert-classifier"](model).shape == (2, 50)


def test_an_init_that_expects_dense_shapes_draws_nothing(tmp_path):
    """Funnel's `_init_weights` unpacks the shape of each linear weight, loaded or not."""
    sizes = {"vocab_size": 64, "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 96, "block_sizes": [1, 1]}
    torch.manual_seed(0)
    FunnelForMaskedLM(FunnelConfig(**sizes, num_decoder_layers=1)).save_pretrained(tmp_path / "dense")
    config = lb.LowBitConfig(bits=4, group_size=32)
    model = FunnelForMaskedLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    model.save_pretrained(tmp_path / "low-bit")
    again = FunnelForMaskedLM.from_pretrained(tmp_path / "low-bit").state_dict()
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(again[name], tensor)] == []
