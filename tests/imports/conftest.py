"""A tiny Llama to import, whose sizes are multiples of 32 as GPTQ needs them."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=96)).eval()
