"""The benchmark of products with live blocks: it times what it says, and a busy machine leaves no figures."""

import pytest
import torch

from benchmarks import blocks
from benchmarks.linear import medians
from benchmarks.record import Record


SHAPE, BLOCK, SPARSITY = (64, 128), 16, 0.75


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("benchmarks.linear.BUDGET", 0.0)
    monkeypatch.setattr(blocks, "RING_BYTES", 1e4)
    monkeypatch.setattr(blocks, "HIDDEN", 32)
    monkeypatch.setattr(blocks, "INTERMEDIATE", 64)
    monkeypatch.setattr(blocks, "stream_gb_per_s", lambda: 10.0)
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", blocks.DTYPES.values(), ids=blocks.DTYPES)
def test_every_candidate_is_a_product(dtype):
    with torch.no_grad():
        functions, limit = blocks.forward_candidates(SHAPE, BLOCK, SPARSITY, dtype)
        assert limit == 4.0
        assert set(functions) == {"dense", "blocks", "torch"} | ({"bsr"} if dtype == torch.float32 else set())
        x = torch.randn(3, SHAPE[1]).to(dtype)
        found = {name: function(x, 1) for name, function in functions.items()}
        assert all(y.shape == (3, SHAPE[0]) for y in found.values())
        for name in set(found) - {"dense"}:
            torch.testing.assert_close(found[name], found["blocks"], atol=2e-2, rtol=2e-2)
        seconds = medians(functions, x)
    assert set(seconds) == set(functions) and min(seconds.values()) > 0
    blocks.check(functions, BLOCK, SHAPE, dtype)


def test_a_wrong_product_is_not_timed(monkeypatch):
    monkeypatch.setattr(blocks, "block_linear", lambda x, values, *rest: x.new_ones(len(x), SHAPE[0]))
    with pytest.raises(AssertionError):
        blocks.check({}, BLOCK, SHAPE, torch.float32)


def test_training_takes_the_gradients_of_the_input_and_of_all_weights(monkeypatch):
    seen = []
    gradients = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda y, of: seen.append((of, gradients(y, of))))
    functions = blocks.training_candidates(16, 0.5, torch.float32)
    assert set(functions) == {"dense", "blocks", "torch"}
    for function in functions.values():
        function(torch.randn(4, 32), 0)
    for wanted, given in seen:
        assert len(wanted) == 4 and all(
            g.shape == w.shape and bool(g.any()) for w, g in zip(wanted, given, strict=True)
        )
    assert len(seen) == 3


@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "busy"])
def test_only_a_quiet_machine_is_recorded(monkeypatch, tmp_path, capsys, quiet):
    monkeypatch.setattr(blocks, "is_quiet", lambda others, stream: quiet)
    record = Record("blocks", {}, folder=tmp_path)
    functions, limit = blocks.forward_candidates(SHAPE, BLOCK, SPARSITY, torch.bfloat16)
    facts = {"limit": limit, "kernel": blocks.kernel_of(BLOCK, SHAPE, 2, torch.bfloat16)}
    with torch.no_grad():
        blocks.measure(record, "row", functions, torch.randn(2, SHAPE[1]).bfloat16(), facts, show=False)
    assert list(record.rows) == (["row"] if quiet else [])
    assert ("thrown away" in capsys.readouterr().out) is not quiet
    for row in record.rows.values():
        assert row["products"]["dense"]["ratio"] == 1.0 and row["limit"] == 4.0
