"""The comparison of ways to block sparsity: baselines are what they are called, tables compare seed by seed."""

from xml.etree import ElementTree

import pytest
import torch

from benchmarks import render_sparsity as render
from benchmarks import sparsity as bench
from benchmarks import sparsity_tables as tables
from benchmarks.plot import ticks
from hf_lowbit.nn.sparsify import sparse_modules


@pytest.fixture(scope="module")
def data():
    return bench.train_text()


@pytest.mark.parametrize("method", ["static", "one-shot", "grow", "gradual", "union", "codes"])
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
    "gradual/0.9/seed0": {"test": 2.1}, "gradual/0.9/seed1": {"test": 2.4},
    "static/0.9/seed1": {"test": 2.5}, "static/0.7/seed1": {"test": 2.35},
    "grow/0.9/seed0": {"test": 2.05}, "grow-slow/0.9/seed0": {"test": 2.2},
}  # fmt: skip


def test_table():
    lines = tables.quality_table({"rows": ROWS}).splitlines()
    assert lines[2] == "| 0% | dense | 2 | 2.100 |  |  | 0.200 |"
    assert lines[4] == "| 90% | gradual pruning, no growth (the default) | 2 | 2.250 | +0.150 |  | 0.300 |"
    assert lines[5] == "| 90% | prune and grow, budget | 1 | 2.050 | +0.050 | -0.050 |  |"
    assert lines[6] == "| 90% | static random mask | 1 | 2.500 | +0.300 | +0.100 |  |"
    assert "static" in bench.summary(ROWS)
    # a variant without its partner says nothing of growth
    assert tables.growth_table({"rows": ROWS}).splitlines()[2:] == [
        "| 20 steps between updates | 90% | -0.050 | -0.050 |"
    ]


def test_charts():
    svg = ElementTree.fromstring(tables.quality_chart({"rows": ROWS}))
    names = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"dense", "static random mask", "70%", "90%"} <= set(names) and "prune and grow, budget" not in names
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}circle"))) == 2
    rows = {"before/0": {"test": 3.0, "sparsity": 0.0}, "gradual/0.5": {"test": 3.5, "sparsity": 0.5},
            "one-shot/0.5": {"test": 4.0, "sparsity": 0.5}}  # fmt: skip
    assert tables.finetune_table({"rows": rows}).splitlines()[3:] == [
        "| 50% | gradual pruning (the default) | 3.500 | +0.500 |",
        "| 50% | one-shot in the first step, then finetuned | 4.000 | +1.000 |",
    ]
    ElementTree.fromstring(tables.finetune_chart({"rows": rows}))
    with pytest.raises(ValueError, match="series with points"):
        tables.quality_chart({"rows": {"dense/0/seed0": {"test": 2.0}}})


@pytest.mark.parametrize(("low", "high"), [(1.9, 2.18), (0.0, 1.0), (3.0, 3.0), (-2, 250)])
def test_ticks_cover_what_is_drawn(low, high):
    marks = ticks(low, high)
    assert marks[0] <= low and marks[-1] >= high and 2 <= len(marks) <= 7


def test_claims_stand_beside_their_ceilings():
    lines = render.claims_table().splitlines()
    assert lines[2].startswith(
        "| memory, times smaller | Llama-3.1-405B, 95% | 4.45 (second version), 3.12 (first) | 4.38 |"
    )
    assert "| 1.6 | 2.62 |" in lines[4]


def test_ceilings_are_those_of_real_models():
    mlp, total = render.sizes(*render.ARCHITECTURES["SmolLM2-135M"])
    assert total == 134_515_008
    assert mlp / total == pytest.approx(0.592, abs=1e-3)
    assert render.ceiling(mlp, total, 0.95) == pytest.approx(2.29, abs=0.01)
    assert render.ceiling(mlp, total, 0.0) == pytest.approx(1, abs=2e-3)
