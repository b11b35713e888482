"""The comparison of ways to block sparsity: baselines are what they are called, tables compare seed by seed."""

import pytest
import torch

from benchmarks import render_sparsity as render
from benchmarks import sparsity as bench
from hf_lowbit.nn.sparsify import sparse_modules


@pytest.fixture(scope="module")
def data():
    return bench.train_text()


@pytest.mark.parametrize("method", ["static", "one-shot", "grow", "gradual", "union"])
def test_every_way_ends_at_the_target_exactly(method, data, monkeypatch):
    monkeypatch.setattr(bench, "STEPS", 8)
    monkeypatch.setattr(bench, "STEP_SIZE", 2)
    monkeypatch.setattr(bench, "SIZE", {**bench.SIZE, "num_hidden_layers": 1})
    model, logs = bench.train(bench.Run(method, 0.9, 0), data, 8)
    assert bench.measured_sparsity(model) == pytest.approx(0.9, abs=1e-12)
    course = [entry["blast/sparsity"] for entry in logs]
    if method == "static":
        assert course == pytest.approx([0.9] * 8)
        again, _ = bench.train(bench.Run(method, 0.9, 1), data, 1)
        masks = [next(module.mask for _, module in sparse_modules(m)) for m in (model, again)]
        assert not torch.equal(*masks)
    elif method == "one-shot":
        assert course == pytest.approx([0.0] * 3 + [0.9] * 5)
    else:
        assert 0 < course[2] < 0.9 and course[-1] == pytest.approx(0.9)


def test_dense_is_dense(data, monkeypatch):
    monkeypatch.setattr(bench, "SIZE", {**bench.SIZE, "num_hidden_layers": 1})
    model, _ = bench.train(bench.Run("dense", 0.0, 0), data, 1)
    assert bench.measured_sparsity(model) == 0.0 and not list(sparse_modules(model))


ROWS = {
    "dense/0/seed0": {"test": 2.0}, "dense/0/seed1": {"test": 2.2},
    "grow/0.9/seed0": {"test": 2.1}, "grow/0.9/seed1": {"test": 2.4},
    "static/0.9/seed1": {"test": 2.5},
}  # fmt: skip


def test_table():
    lines = render.quality_table({"rows": ROWS}).splitlines()
    assert lines[2] == "| 0% | dense | 2 | 2.100 |  |  | 0.200 |"
    assert lines[3] == "| 90% | prune and grow (the default) | 2 | 2.250 | +0.150 |  | 0.300 |"
    assert lines[4] == "| 90% | static random mask | 1 | 2.500 | +0.300 | +0.100 |  |"
    assert "static" in bench.summary(ROWS)


def test_ceilings_are_those_of_real_models():
    mlp, total = render.sizes(*render.ARCHITECTURES["SmolLM2-135M"])
    assert total == 134_515_008
    assert mlp / total == pytest.approx(0.592, abs=1e-3)
    assert render.ceiling(mlp, total, 0.95) == pytest.approx(2.29, abs=0.01)
    assert render.ceiling(mlp, total, 0.0) == pytest.approx(1, abs=2e-3)
