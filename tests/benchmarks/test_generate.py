"""The benchmark of `generate`: complete rows, without graph breaks, and no figures from a busy machine."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import generate, memory
from benchmarks.record import Record


@pytest.fixture(autouse=True)
def small(monkeypatch, tiny_llama):
    monkeypatch.setattr(generate, "SCHEMES", {"bf16": None, "int4 int8": generate.SCHEMES["int4 int8"]})
    monkeypatch.setattr(generate, "HEADS", {"bf16 head": None, "int8 head": (8, None)})
    monkeypatch.setattr(generate, "dense_folder", lambda name, folder: tiny_llama)
    monkeypatch.setattr(generate, "stream_gb_per_s", lambda: 10.0)
    for name, value in {"PROMPT": 6, "TURNS": 1, "STEPS": 2}.items():
        monkeypatch.setattr(generate, name, value)
    yield
    torch.compiler.reset()


def test_rows_are_complete(monkeypatch, tmp_path):
    monkeypatch.setattr(generate, "MODES", ("eager",))
    monkeypatch.setattr(generate, "HEADS", {"int8 head": (8, None)})
    monkeypatch.setattr(generate, "is_quiet", lambda others, stream: True)
    record = Record("generate", {}, folder=tmp_path)
    assert generate.sweep("tiny", record, tmp_path, until=float("inf"))
    assert list(record.rows) == ["tiny int4 int8, int8 head, eager"]
    for row in record.rows.values():
        assert row["decode"]["ratio"] > 0 and row["prefill"]["after"] > 0
        assert set(row["memory"]) == {"weights", "resident", "mapped", "peak"} and row["memory"]["weights"] > 0
    assert list(generate.cases("tiny", record)) == []


def test_a_busy_machine_and_a_late_hour_leave_nothing(monkeypatch, tmp_path):
    record = Record("generate", {}, folder=tmp_path)
    assert not generate.sweep("tiny", record, tmp_path, until=0.0)
    monkeypatch.setattr(generate, "is_quiet", lambda others, stream: False)
    monkeypatch.setattr(generate, "MODES", ("eager",))
    monkeypatch.setattr(generate, "measure_memory", lambda *_: None)
    assert generate.sweep("tiny", record, tmp_path, until=float("inf"))
    assert record.rows == {}


@pytest.mark.parametrize("head", ["bf16 head", "int8 head"])
def test_a_compiled_step_has_no_graph_break_and_the_same_tokens(head, tiny_llama, monkeypatch):
    """fullgraph=True raises on a break; that something was compiled at all is counted."""
    from torch._dynamo.utils import counters

    # the compiler's own speed is not the topic
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    model = generate.load(tiny_llama, "int4 int8", head)
    prompt = torch.arange(6).unsqueeze(0)
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False)
    generate.set_mode(model, "compiled")
    model.generation_config.compile_config.backend = "aot_eager"
    counters.clear()
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)
    assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]
    generate.set_mode(model, "eager")
    assert model.generation_config.cache_implementation is None


def test_memory_is_that_of_quantizing_in_another_process(tiny_llama):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    dense = sum({t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())
    found = memory.measure(tiny_llama, {"quant_method": "hf_lowbit", "bits": 4, "group_size": 32})
    assert 0 < found["weights"] < dense
