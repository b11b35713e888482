"""SmolLM2-135M, 4 bits in groups of 64, from the dense folder to a fresh process that loads what was saved."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lowbit as lb
from benchmarks.perplexity import novel, paired, window_nlls, windows
from tests.end_to_end.fresh_process import first_output, weight_bytes


PARAMETERS = 134_515_008
# all but the tied embedding (28.3 M) and the norms (35 k)
CONVERTED = 106_168_320
# the header of a safetensors file and the padding of its tensors
FILE_OVERHEAD = 0.02
# nats a token over the first 3,069 of Persuasion: docs/quality.md has 0.24 to 0.27 for 17,391 tokens, and three
# windows alone have an interval of 0.20 to 0.32
NLL_LOSS = (0.20, 0.32)


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def lowbit(smollm2):
    config = lb.LowBitConfig(bits=4, group_size=64)
    return AutoModelForCausalLM.from_pretrained(smollm2, quantization_config=config)


@pytest.fixture(scope="module")
def saved(lowbit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2-4bit")
    lowbit.save_pretrained(folder)
    return folder


def test_every_parameter_is_in_the_report(lowbit):
    report = lb.report(lowbit)
    assert report.total_parameters == sum(row.parameters for row in report.modules) == PARAMETERS
    assert report.lowbit_parameters == CONVERTED
    assert report.total_bytes == sum(row.bytes for row in report.modules)


def test_file_is_as_large_as_the_scheme_says(lowbit, saved):
    # 4 bits, and a bfloat16 scale for 64 weights
    expected = CONVERTED * (4 + 16 / 64) / 8 + 2 * (PARAMETERS - CONVERTED)
    assert lb.report(lowbit).total_bytes == expected
    assert weight_bytes(saved) == pytest.approx(expected, rel=FILE_OVERHEAD)


def test_answers_a_question(lowbit, tokenizer):
    chat = [{"role": "user", "content": "What is the capital of France? One sentence."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = lowbit.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert "Paris" in tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])


def test_fresh_process_computes_the_same_bits(lowbit, saved, tokenizer, tmp_path):
    inputs = dict(tokenizer("Sir Walter Elliot, of Kellynch Hall, in Somersetshire", return_tensors="pt"))
    with torch.inference_mode():
        expected = lowbit(**inputs)[0]
    assert torch.equal(first_output("AutoModelForCausalLM", saved, inputs, tmp_path), expected)


def test_perplexity_stays_in_its_band(smollm2, lowbit, tokenizer):
    batch = windows(tokenizer, novel("persuasion"), count=3)
    dense = list(window_nlls(AutoModelForCausalLM.from_pretrained(smollm2), batch))
    # 41 was seen over these windows; a broken conversion of the asset is noticed here
    assert 35 < math.exp(sum(dense) / len(dense)) < 47
    low, high = NLL_LOSS
    assert low < paired(dense, list(window_nlls(lowbit, batch))).mean < high
