"""Quantizing while loading never holds the dense model: its peak is the low-bit model and a few tensors."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import hf_lowbit as lb
from hf_lowbit.nn.packed import LowBitModule
from tests.quantizers.live_memory import LiveMemory


LAYERS = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 4}
SIZES = {**LAYERS, "vocab_size": 256}
# while a weight is rounded: itself, read or fused from several files, its float32 copy, that in groups, and the codes
TENSORS_AT_WORK = 5


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def dense(request, tmp_path_factory):
    """(folder of a checkpoint of 35 to 50 MB, its bytes, the bytes of its largest weight)"""
    folder = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    if request.param == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    else:
        model = MixtralForCausalLM(MixtralConfig(**{**SIZES, "intermediate_size": 512}, num_local_experts=2))
    model.save_pretrained(folder)
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    return folder, sum(sizes), max(sizes)


def test_counter_sees_what_is_alive():
    before = torch.zeros(1000)
    with LiveMemory() as memory:
        kept = before + 1
        view = kept[10:]
        gone = torch.empty(5000)
        del gone
        after = view.clone()
    assert memory.live == 4 * (1000 + 990) == kept.nbytes + after.nbytes
    assert memory.peak == 4 * (1000 + 5000)
    assert memory.largest == 4 * 5000


@pytest.mark.parametrize("bits", [8, "ternary"])
def test_peak_of_quantizing_on_the_fly(dense, bits):
    folder, dense_bytes, largest = dense
    with LiveMemory() as memory:
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=lb.LowBitConfig(bits=bits))
    low_bytes = model.get_memory_footprint()
    assert memory.peak <= low_bytes + TENSORS_AT_WORK * largest
    # the bound says something: it is well below both models together
    assert low_bytes + TENSORS_AT_WORK * largest < 0.8 * (dense_bytes + low_bytes)
    assert any(isinstance(module, LowBitModule) for module in model.modules())


def test_low_bit_checkpoint_is_not_unpacked_while_loading(dense, tmp_path):
    folder, dense_bytes, _ = dense
    config = lb.LowBitConfig(bits="ternary")
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).save_pretrained(tmp_path)
    with LiveMemory() as memory:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert memory.peak <= model.get_memory_footprint() < dense_bytes / 4


def test_in_memory_frees_each_dense_weight_as_it_goes(dense):
    folder, dense_bytes, largest = dense
    with LiveMemory() as memory:
        model = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(folder).config)
        start = memory.live
        lb.quantize(model, lb.LowBitConfig(bits=8))
    assert start >= dense_bytes
    assert memory.peak <= start + TENSORS_AT_WORK * largest
