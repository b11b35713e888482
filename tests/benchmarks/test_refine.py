"""The refinement benchmark on a tiny model: its rows are complete, and `won` is a share of the increase."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import perplexity, refine
from benchmarks.record import RESULTS, Record


def test_rows_are_complete(tiny_llama, tmp_path, monkeypatch):
    for name, value in {"TOKENS": 16, "BLOCK_STEPS": 2, "GLOBAL_STEPS": 2, "GROUP": 16}.items():
        monkeypatch.setattr(refine, name, value)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)

    def load():
        return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)

    record = Record("refine", {}, folder=tmp_path)
    text = perplexity.windows(tokenizer, perplexity.novel("persuasion"), 32, 2)
    record.add("dense", refine.measure(load(), text, None))
    tuning, held_out = refine.batches(tokenizer, "emma", 2), refine.batches(tokenizer, "sensesensibility", 1)
    refine.measure_stages(2, load, load(), record, tuning, held_out, text)
    assert list(record.rows) == ["dense", "2/g16/rtn", "2/g16/blocks", "2/g16/global"]
    assert all("won" in record.rows[f"2/g16/{stage}"] for stage in ("blocks", "global"))
    assert record.rows["2/g16/blocks"]["blocks"] == 2
    refine.compare_targets(2, load, load(), record, tuning, held_out, text)
    assert "won" in record.rows["2/g16/blocks-quantized"]


def test_the_share_won():
    dense, start, now = ({"perplexity": value} for value in (20.0, 30.0, 24.0))
    assert refine.won(start, now, dense) == pytest.approx(0.6)


def test_the_document_says_what_was_measured():
    rows = json.loads((RESULTS / "refine.json").read_text())["rows"]
    document = (RESULTS.parents[1] / "docs" / "compress_stages.md").read_text()
    assert f"The dense model has {rows['dense']['perplexity']:.2f}." in document
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in document.splitlines() if line[:1] == "|"]
    stages = {"rounding": "rtn", "after the block stage": "blocks", "after the global stage": "global"}
    for bits, stage, value, _, share in table[2:]:
        row = rows[f"{bits}/g64/{stages[stage]}"]
        assert value == f"{row['perplexity']:.2f}"
        assert share == (f"{100 * row['won']:.1f}%" if "won" in row else "")
