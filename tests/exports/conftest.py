"""The exports read real models: SmolLM2, and a tiny Llama with a real tokenizer."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from tests.assets import smollm2, tiny_llama  # noqa: F401


@pytest.fixture
def make(tiny_llama):  # noqa: F811
    """make(dtype=..., **of LowBitConfig) -> the tiny Llama, low-bit, as from_pretrained gives it."""

    def build(dtype=torch.float32, **wishes):
        config = lb.LowBitConfig(**wishes)
        return AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=config, dtype=dtype).eval()

    return build
