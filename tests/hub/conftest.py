"""Fixtures of the hub tests: the loopback server, a tiny dense model, its tokenizer and its low-bit form."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_lowbit as lb
from tests.hub_fixture import hub  # noqa: F401


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory):
    """A dense Llama with 64 hidden units, under a path that no published file may contain."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    folder = tmp_path_factory.mktemp("private-place") / "secret-base"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def lowbit(dense_folder):
    """The same model with 4-bit weights in groups of 32."""
    return AutoModelForCausalLM.from_pretrained(
        dense_folder, quantization_config=lb.LowBitConfig(bits=4, group_size=32)
    )


@pytest.fixture(scope="session")
def tokenizer():
    """Words to ids, made here, with a chat template."""
    words = ["<unk>", "<s>", "</s>", "the", "cat", "sat", "on", "mat"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made
