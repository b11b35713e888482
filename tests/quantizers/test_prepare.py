"""`prepare_model_for_lowbit_training` leaves a model that adapters can be trained on, with nothing low-bit touched."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hf_lowbit as lb
from tests.quantizers.architectures import BY_ID, IDS


pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing` is deprecated:FutureWarning")


def lowbit(dtype=torch.bfloat16, name="llama"):
    return lb.quantize(BY_ID[name].build().to(dtype), lb.LowBitConfig(bits=4, group_size=32))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_adapters_get_gradients_through_recomputed_blocks(reentrant):
    model = lb.prepare_model_for_lowbit_training(lowbit(), gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    adapters = [p for n, p in model.named_parameters() if "lora_" in n]
    assert adapters and all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapters)
    assert all(p.grad is None for n, p in model.named_parameters() if "lora_" not in n)


def test_norms_are_float32_and_the_rest_keeps_its_dtype():
    model = lowbit()
    before = {n: p.dtype for n, p in model.named_parameters()}
    logits = BY_ID["llama"](model)
    prepared = lb.prepare_model_for_lowbit_training(model)
    assert prepared is model
    changed = {n for n, p in model.named_parameters() if p.dtype != before[n]}
    assert changed == {n for n in before if "norm" in n}
    assert not any(p.requires_grad for p in model.parameters())
    assert BY_ID["llama"](model).dtype == torch.bfloat16
    # bfloat16 keeps 8 bits of each activation
    assert (BY_ID["llama"](model) - logits).norm() < 0.05 * logits.norm()


def test_without_checkpointing():
    model = lb.prepare_model_for_lowbit_training(lowbit(), use_gradient_checkpointing=False, upcast_norms=False)
    assert not model.is_gradient_checkpointing
    assert model.model.norm.weight.dtype == torch.bfloat16


def test_dense_model_is_refused():
    with pytest.raises(ValueError, match="no low-bit layer"):
        lb.prepare_model_for_lowbit_training(BY_ID["llama"].build())


def test_other_things_are_refused():
    with pytest.raises(TypeError, match="str"):
        lb.prepare_model_for_lowbit_training("llama")
