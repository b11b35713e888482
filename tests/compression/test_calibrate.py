"""Calibration data of every kind becomes batches of model inputs; what can't be used is refused in a sentence.

Public reports: openvinotoolkit/nncf#2230, vllm-project/llm-compressor#1510 and #1589, AutoGPTQ/AutoGPTQ#267.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.perplexity import novel
from hf_lowbit.compression.calibrate import make_batches
from tests.assets import tiny_llama  # noqa: F401
from tests.quantizers.architectures import BY_ID


TEXT = novel("emma")[:20_000]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):  # noqa: F811
    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(scope="module")
def model(tiny_llama):  # noqa: F811
    return AutoModelForCausalLM.from_pretrained(tiny_llama)


def test_texts_are_packed_into_full_rows(tokenizer, model):
    batches = make_batches([TEXT, TEXT[::-1]], tokenizer, model, length=64, rows=5)
    assert [tuple(b["input_ids"].shape) for b in batches] == [(1, 64)] * 5


def test_the_seed_chooses_the_rows(tokenizer):
    def ids(seed):
        return torch.cat([b["input_ids"] for b in make_batches([TEXT], tokenizer, length=64, rows=4, seed=seed)])

    assert torch.equal(ids(3), ids(3)) and not torch.equal(ids(3), ids(4))


def test_a_text_file_is_its_text(tokenizer, tmp_path):
    path = tmp_path / "my.txt"
    path.write_text(TEXT, encoding="utf-8")
    given = [make_batches(data, tokenizer, length=64) for data in (path, str(path), [TEXT])]
    for batches in given[1:]:
        assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(given[0], batches, strict=True))


def test_chats_go_through_the_template(tokenizer):
    chat = [{"role": "user", "content": TEXT[:400]}]
    assert make_batches([chat], tokenizer)[0]["input_ids"].shape[1] > 32
    assert torch.equal(make_batches(chat, tokenizer)[0]["input_ids"], make_batches([chat], tokenizer)[0]["input_ids"])


def test_tensors_and_dicts_are_taken_as_they_are(model):
    ids = torch.randint(0, 384, (3, 40))
    assert torch.equal(torch.cat([b["input_ids"] for b in make_batches(ids, model=model)]), ids)
    assert torch.equal(make_batches([ids[0], ids[1]], model=model)[1]["input_ids"], ids[1:2])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert make_batches([inputs], model=model)[0].keys() == inputs.keys()
    assert make_batches({"pixel_values": torch.rand(1, 3, 8, 8)})[0]["pixel_values"].shape == (1, 3, 8, 8)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lambda ids: ids.numpy(), id="array"),
        pytest.param(lambda ids: list(ids.numpy()), id="arrays"),
        pytest.param(lambda ids: ids.tolist(), id="lists"),
        pytest.param(lambda ids: (row for row in ids), id="generator"),
        pytest.param(lambda ids: [{"input_ids": row.tolist()} for row in ids], id="rows-of-lists"),
        pytest.param(lambda ids: [{"input_ids": row, "attention_mask": row * 0 + 1} for row in ids], id="rows"),
    ],
)
def test_token_ids_in_any_form(model, data):
    ids = torch.randint(0, 384, (3, 40))
    batches = make_batches(data(ids), model=model)
    assert all(tensor.shape == (1, 40) for batch in batches for tensor in batch.values())
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches]), ids)


def test_rows_of_a_dataset_are_read_by_their_column(tokenizer, model):
    rows = [{"text": TEXT[:2000], "label": 1}, {"text": TEXT[2000:4000], "label": 0}]
    wanted = make_batches([row["text"] for row in rows], tokenizer, model)
    assert torch.equal(make_batches(rows, tokenizer, model)[0]["input_ids"], wanted[0]["input_ids"])


def test_splits_are_named(tokenizer, model):
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": [TEXT]})})
    with pytest.raises(TypeError, match="train"):
        make_batches(splits, tokenizer, model)


def test_a_dataset_is_read_by_its_column(tokenizer):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": [TEXT]})
    assert torch.equal(
        make_batches(dataset, tokenizer)[0]["input_ids"], make_batches([TEXT], tokenizer)[0]["input_ids"]
    )
    with pytest.raises(ValueError, match="prose"):
        make_batches(datasets.Dataset.from_dict({"prose": [TEXT]}), tokenizer)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        pytest.param([], ValueError, "empty", id="empty"),
        pytest.param([""], ValueError, "0 tokens", id="empty-text"),
        pytest.param(["a"], ValueError, "tokens", id="one-token"),
        pytest.param(torch.tensor([[1]]), ValueError, "1 tokens", id="one-token-id"),
        pytest.param(torch.full((1, 64), 5000), ValueError, "vocabulary", id="other-vocabulary"),
        pytest.param(torch.rand(1, 64), ValueError, "whole numbers", id="floats"),
        pytest.param(3, TypeError, "int", id="number"),
        pytest.param("no/such/file.txt", FileNotFoundError, "no text file", id="missing-file"),
        pytest.param([TEXT, 3], TypeError, "mixes", id="mixed"),
        pytest.param([None], TypeError, "NoneType", id="none-in-a-list"),
        pytest.param([["a text", "another"]], TypeError, "flat list of texts", id="nested-texts"),
        pytest.param(TEXT, FileNotFoundError, "list of strings", id="one-long-text"),
        pytest.param(torch.zeros(0, 16, dtype=torch.long), ValueError, "no tokens", id="empty-tensor"),
        pytest.param(torch.full((1, 64), -100), ValueError, "not negative", id="negative-ids"),
        pytest.param([{"labels": torch.ones(1, 40)}], ValueError, "input_ids", id="labels-only"),
        pytest.param([{"tokens": torch.ones(1, 40)}], ValueError, "tokens", id="unknown-argument"),
    ],
)
def test_what_cannot_be_used_is_refused(tokenizer, model, data, error, message):
    with pytest.raises(error, match=message):
        make_batches(data, tokenizer, model)


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(ValueError, match="no tokenizer"):
        make_batches([TEXT])


def test_sound_without_decoder_inputs_begins_its_decoder():
    row = BY_ID["whisper"]
    batch = make_batches([{"input_features": row.inputs["input_features"]}], model=row.build())[0]
    assert batch["decoder_input_ids"].tolist() == [[1], [1]]
    with torch.no_grad():
        assert torch.isfinite(row.build()(**batch).logits).all()
