"""The benchmark of compressed encoders on a tiny BERT: nearer at 8 bits than at 4, and calibrated on other texts."""

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from benchmarks import compress_encoder
from benchmarks.encoder import passages


@pytest.fixture(scope="module")
def encoder(tiny_llama):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                        num_attention_heads=2)  # fmt: skip
    return BertModel(config, add_pooling_layer=False).eval(), tokenizer


def test_rows(encoder):
    dense, tokenizer = encoder
    with torch.no_grad():
        data = compress_encoder.read(dense, tokenizer, rows=6, test=3)
    assert len(data.calibration) == 6 and len(data.test) == 12
    calibration = {tuple(batch["input_ids"][0].tolist()) for batch in data.calibration}
    tested = tokenizer(data.test, truncation=True, max_length=compress_encoder.TOKENS)["input_ids"]
    assert not calibration & {tuple(ids) for ids in tested}
    found = {bits: compress_encoder.measure(dense, tokenizer, data, bits, "gptq") for bits in (8, 3)}
    assert 0.999 < found[8]["cosine"] <= 1.0001 and found[3]["cosine"] < found[8]["cosine"]
    assert found[3]["lowest"] <= found[3]["cosine"] and found[3]["passages"] == 12
    assert found[3]["bytes"] < found[8]["bytes"]


def test_calibration_reads_no_novel_that_is_evaluated():
    found = passages(4, 1)
    allowed = [compress_encoder.NOVELS.index(name) for name in compress_encoder.CALIBRATION]
    assert {compress_encoder.NOVELS[label] for label in allowed} == {"emma", "sensesensibility"}
    assert any(label not in allowed for label in found.train_labels.tolist())
