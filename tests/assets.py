"""Fixtures for the real models, and for a tiny random one with a real tokenizer.

A real model that was not fetched skips the test with a sentence. Where HF_LOWBIT_REQUIRE_ASSETS=1, as in CI, it fails
instead: a skipped test would hide an untested loader. Import the fixtures in a conftest.py to use them.
"""

import os
from pathlib import Path

import pytest
import torch

from benchmarks.perplexity import novel
from scripts.fetch_assets import locate


TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def asset(name: str) -> Path:
    """The folder of a fetched model; the test is skipped, or fails where models are required."""
    folder = locate(name)
    if folder is not None:
        return folder
    reason = f"the model {name!r} is not on this machine; run `python scripts/fetch_assets.py` to fetch it."
    if os.environ.get("HF_LOWBIT_REQUIRE_ASSETS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, dequantised Q4_1, permuted: bfloat16."""
    return asset("smollm2")


@pytest.fixture(scope="session")
def smollm2_shipped() -> Path:
    """The same function as `smollm2`, its weights still on their 4-bit grid: float32."""
    return asset("smollm2-shipped")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2: a BERT encoder, float32."""
    return asset("minilm")


@pytest.fixture(scope="session")
def albert() -> Path:
    """RXNMapper's ALBERT: twelve layers that share one set of weights, float32, in a .bin file."""
    return asset("albert")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """A folder with a random two-layer Llama and a byte-level tokenizer trained on a novel: made in a second."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny_llama")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([novel("emma")[:100_000]], vocab_size=384, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=384, max_position_embeddings=512)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
