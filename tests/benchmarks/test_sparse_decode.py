"""The benchmark of decoding with sparse MLPs: sizes are those of the tensors, and no speed of a busy machine is kept."""

import pytest
import torch

from benchmarks import sparse_decode as bench
from benchmarks.record import Record
from hf_lowbit.nn.sparsify import sparse_modules


SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "intermediate_size": 160,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("quiet", [True, False])
def test_rows(quiet, monkeypatch, tmp_path):
    for name, value in {
        "BLOCK": 8,
        "PROMPT": 4,
        "stream_gb_per_s": lambda: 10.0,
        "is_quiet": lambda *_: quiet,
    }.items():
        monkeypatch.setattr(bench, name, value)
    record = Record("sparse_decode", {}, folder=tmp_path)
    bench.measure(record, SIZES, turns=1, steps=2, show=False)
    sizes = {f"size 95% {candidate}" for candidate in bench.CANDIDATES}
    speeds = {f"decode 95% {candidate}" for candidate in bench.CANDIDATES} if quiet else set()
    assert set(record.rows) == sizes | speeds
    ratios = [record.rows[key]["ratio"] for key in sorted(sizes, reverse=True)]
    assert 1 < ratios[0] < ratios[1]
    assert all(record.rows[key]["ratio"] > 0 for key in speeds)


@pytest.mark.parametrize("candidate", bench.CANDIDATES)
def test_a_candidate_is_as_sparse_and_as_small_as_it_says(candidate, monkeypatch):
    monkeypatch.setattr(bench, "BLOCK", 8)
    model = bench.sparse_model(SIZES, candidate)
    for _, module in sparse_modules(model):
        assert module.measured_sparsity == pytest.approx(0.95, abs=0.08) and module.layout.balance == "row"
    # the output layer is the embedding
    once = {name: p for name, p in model.state_dict().items() if not name.startswith("lm_head")}
    hidden = [b for name, b in model.named_buffers() if name not in once]
    assert bench.weight_bytes(model) == sum(t.numel() * t.element_size() for t in (*once.values(), *hidden))
    assert model(torch.arange(6)[None]).logits.isfinite().all()
