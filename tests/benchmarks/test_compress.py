"""The benchmark of compression on a tiny model: each kind of row says what its plan, its stages and its size are."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import compress, perplexity, refine


@pytest.fixture(scope="module")
def tiny(tiny_llama):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    dense = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).eval()
    text = perplexity.windows(tokenizer, perplexity.novel("persuasion"), 32, 2)
    calibration = perplexity.windows(tokenizer, perplexity.novel("emma"), 16, 4)
    base = refine.measure(dense, text, None)
    uniform = compress.measure_row(dense, base, 3, "gptq", calibration, text, None)
    return dense, base, calibration, text, uniform


def test_uniform_rows(tiny):
    dense, base, calibration, text, uniform = tiny
    assert uniform["ratio"] == pytest.approx(uniform["perplexity"] / base["perplexity"], abs=1e-4)
    assert uniform["average"] > 3 and "won" not in uniform and len(uniform["nlls"]) == 2
    plain = compress.measure_row(dense, base, 3, "rtn", calibration, text, None)
    assert plain["bytes"] == uniform["bytes"] and plain["perplexity"] != uniform["perplexity"]


@pytest.mark.parametrize("method", ["planned", "budget"])
def test_plans_are_no_larger_than_the_uniform_row(tiny, method):
    dense, base, calibration, text, uniform = tiny
    row = compress.measure_row(dense, base, 3, method, calibration, text, uniform)
    assert row["bytes"] <= uniform["bytes"]
    assert row["won"] == refine.won(uniform, row, base)
    # with a budget the table is planned too, with an average the layers alone
    layers = sum(isinstance(m, torch.nn.Linear) for n, m in dense.named_modules() if n != "lm_head")
    assert sum(row["modules"].values()) == layers + (method == "budget") * (1 + (not dense.config.tie_word_embeddings))


def test_every_row_has_a_key_of_its_own_and_plans_come_after_what_they_are_held_against():
    keys = [key for key, *_ in compress.work()]
    assert len(keys) == len(set(keys))
    for key, prefix, bits, method in compress.work():
        if method in ("planned", "budget", "stages"):
            assert keys.index(f"{prefix}{bits}/gptq") < keys.index(key)
    assert {prefix for _, prefix, *_ in compress.work()} == set(compress.MODELS)
