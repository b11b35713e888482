"""Adapters on low-bit weights train through the real Trainer; the low-bit weights do not, and nobody pretends."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import hf_lowbit as lb
from hf_lowbit.nn.packed import LowBitModule
from tests.quantizers.architectures import BY_ID, IDS


# the name of the argument that all supported versions of transformers know
pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing` is deprecated:FutureWarning")

FIELDS = {"bits": 4, "group_size": 32}


class Sentences(Dataset):
    """Two sentences, over and over."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"input_ids": IDS[index % 2], "labels": IDS[index % 2]}


def arguments(folder, **fields):
    return TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1, **fields,
    )  # fmt: skip


def load(lowbit_folder, name="llama"):
    return AutoModelForCausalLM.from_pretrained(lowbit_folder(name, **FIELDS))


def packed_state(model):
    """Every tensor of every low-bit module, biases left out."""
    return {
        f"{path}.{name}": tensor.clone()
        for path, module in model.named_modules()
        if isinstance(module, LowBitModule)
        for name, tensor in module.named_parameters(recurse=False)
        if name != "bias"
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param("llama", ["q_proj", "up_proj"], id="linear"),
        pytest.param("llama", "all-linear", id="all-linear"),
        pytest.param("qwen2", ["q_proj", "down_proj"], id="with-biases"),
        pytest.param("mixtral", ["q_proj"], id="mixture"),
    ],
)
@pytest.mark.parametrize(
    "checkpointing", [{}, {"gradient_checkpointing": True}], ids=["plain", "activation-checkpointing"]
)
def test_lora_trains_and_codes_stay(name, target, checkpointing, lowbit_folder, tmp_path):
    base = load(lowbit_folder, name)
    codes, logits = packed_state(base), BY_ID[name](base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=target, init_lora_weights=True))
    adapters = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_B" in n}
    assert adapters and all(not tensor.any() for tensor in adapters.values())
    Trainer(model=model, args=arguments(tmp_path, **checkpointing), train_dataset=Sentences()).train()
    model.eval()
    changed = {n: p for n, p in model.named_parameters() if n in adapters and not torch.equal(p, adapters[n])}
    assert changed.keys() == adapters.keys()
    assert_same({n.replace(".base_layer", ""): t for n, t in packed_state(model.base_model.model).items()}, codes)
    trained = BY_ID[name](model)
    assert not torch.equal(trained, logits)
    # the adapter is saved without the base, and finds its place again on the same low-bit base
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(lowbit_folder, name), tmp_path / "adapter")
    assert torch.equal(BY_ID[name](again), trained)


def test_trainer_refuses_a_low_bit_model_without_adapters(lowbit_folder, tmp_path):
    """Public report: huggingface/peft#1342."""
    with pytest.raises(ValueError, match="quantized"):
        Trainer(model=load(lowbit_folder), args=arguments(tmp_path), train_dataset=Sentences())


def test_model_quantized_in_memory_is_refused_too(tmp_path):
    model = lb.quantize(BY_ID["llama"].build(), lb.LowBitConfig(**FIELDS))
    with pytest.raises(ValueError, match="quantized"):
        Trainer(model=model, args=arguments(tmp_path), train_dataset=Sentences())


def test_dequantized_model_trains(lowbit_folder, tmp_path):
    model = load(lowbit_folder).dequantize()
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    Trainer(model=model, args=arguments(tmp_path), train_dataset=Sentences()).train()
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before)


def test_gradients_reach_what_is_dense_and_nothing_else(lowbit_folder):
    model = load(lowbit_folder, "qwen2")
    model(input_ids=IDS, labels=IDS).loss.backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, parameter in model.named_parameters() if parameter.is_floating_point()
                             and not name.endswith("_scale")}  # fmt: skip
    assert all(model.get_parameter(name).grad.abs().sum() > 0 for name in with_gradient if "norm" in name)


def test_gradients_equal_those_of_the_dequantized_model(lowbit_folder):
    # float32 sums in another order
    tolerance = 1e-4
    model, dense = load(lowbit_folder, "qwen2"), load(lowbit_folder, "qwen2").dequantize()
    for one in (model, dense):
        one(input_ids=IDS, labels=IDS).loss.backward()
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias", "model.norm.weight"):
        expected = dense.get_parameter(name).grad
        assert (model.get_parameter(name).grad - expected).norm() <= tolerance * expected.norm(), name
