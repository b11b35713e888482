"""`auto` takes live blocks where they were measured to be no slower than the dense product, and nowhere else."""

import json

import pytest
import torch
import torch.nn.functional as F

from benchmarks import crossover
from benchmarks.record import RESULTS
from hf_lowbit.functional import block_crossover, block_dispatch
from hf_lowbit.functional.block_dispatch import BlockKernel, BlockProblem, explain_blocks
from hf_lowbit.functional.block_masks import scatter
from hf_lowbit.functional.blocks import block_linear, dense_of
from hf_lowbit.functional.dispatch import use_kernel
from tests.kernels.test_cpu_blocks import weights


DTYPES = {name: dtype for dtype, name in block_crossover.NAMES.items()}


@pytest.fixture
def by(request, monkeypatch):
    """Only one kind of kernel: "library" (one that takes everything) or "torch"."""
    taken = [BlockKernel("cpu-any", 1, lambda problem: None, lambda *_: None)] if request.param == "library" else []
    monkeypatch.setattr(block_dispatch, "_kernels", taken)
    monkeypatch.setattr(block_dispatch, "_choices", {})
    return request.param


def problem(dtype, block, rows, sparsity, device="cpu"):
    return BlockProblem(block, block, 4, 8 * block, rows, DTYPES[dtype], device, sparsity=sparsity)


def stored():
    return json.loads((RESULTS / "blocks.json").read_text())["rows"]


def test_the_table_is_that_of_the_results():
    assert list(block_crossover.read_table()) == crossover.derive(stored())


@pytest.mark.parametrize("by", ["library", "torch"], indirect=True)
def test_no_choice_was_slower_than_dense_by_more_than_a_twentieth(by):
    chosen = 0
    for (use, who, dtype, block, rows), ratios in crossover.measured(stored()).items():
        for sparsity, ratio in ratios.items():
            if who != by:
                continue
            asked = problem(dtype, block, rows, sparsity)
            if block_crossover.pays(use, asked):
                chosen += 1
                assert 1 / ratio <= 1.05
            else:
                # no faster way was left out, unless a higher sparsity was slower, which only noise can do
                assert min(r for s, r in ratios.items() if s >= sparsity) < crossover.LEAST
            if block_crossover.is_slower(use, asked):
                assert max(r for s, r in ratios.items() if s <= sparsity) < 1 or ratio < crossover.LEAST
    assert chosen > 5


@pytest.mark.parametrize("by", ["library"], indirect=True)
def test_what_was_not_measured_does_not_pay(by):
    pays = block_crossover.pays
    assert pays("training", problem("fp32", 64, 512, 0.95))
    assert not pays("training", problem("fp32", 16, 512, 0.95))
    assert not pays("training", problem("fp32", 64, 512, 0.5))
    assert not pays("training", problem("fp32", 64, 512, 0.95, "cuda"))
    assert not pays("training", problem("fp32", 64, 512, 0.95)._replace(dtype=torch.float16))
    assert not pays("training", problem("fp32", 64, 512, None))
    # larger blocks and fewer rows are no slower
    assert pays("training", problem("fp32", 128, 64, 0.95))


def test_the_table_is_derived_cell_by_cell():
    def row(ratio, kernel="cpu-avx2"):
        return {"kernel": kernel, "products": {"blocks": {"ratio": ratio}, "torch": {"ratio": ratio / 2}}}

    rows = {
        "forward bf16 1x2 70% b64 M=64": row(1.5), "forward bf16 2x1 70% b64 M=64": row(0.9),
        "forward bf16 1x2 80% b64 M=64": row(0.96), "forward bf16 1x2 90% b64 M=64": row(3.0),
    }  # fmt: skip
    assert crossover.derive(rows) == [
        {
            "use": "inference",
            "by": "library",
            "dtype": "bf16",
            "block": 64,
            "rows": 64,
            "sparsity": 0.8,
            "slower": 0.7,
        },
        {"use": "inference", "by": "torch", "dtype": "bf16", "block": 64, "rows": 64, "sparsity": 0.9, "slower": 0.8},
    ]
    assert [r["by"] for r in crossover.derive({"training fp32 1x2 90% b64 M=8": row(2, "torch")})] == ["torch"]


@pytest.mark.parametrize("by", ["torch"], indirect=True)
@pytest.mark.parametrize("balance", ["row", "none"])
def test_torch_alone_rebuilds_the_dense_weight_where_its_blocks_were_slower(by, balance, monkeypatch):
    cell = {
        "use": "inference",
        "by": "torch",
        "dtype": "fp32",
        "block": 64,
        "rows": 32,
        "sparsity": None,
        "slower": 0.9,
    }
    monkeypatch.setattr(block_crossover, "read_table", lambda: (cell,))
    block_crossover.slower_sparsity.cache_clear()
    try:
        dense, values, columns, pointers = weights((70, 90), (8, 24), balance, torch.float32)
        assert torch.equal(
            dense_of(values, columns, pointers, 90)[:70], scatter(values, columns, pointers, (70, 90), (8, 24))
        )
        asked = problem("fp32", 8, 40, 0.5)
        assert "dense weight" in explain_blocks(asked)[-1][1]
        assert "operation by operation" in explain_blocks(asked._replace(rows=20))[-1][1]
        assert "operation by operation" in explain_blocks(asked._replace(sparsity=0.95))[-1][1]
        x = torch.randn(40, 90)
        y = block_linear(x, values, columns, None, 90, pointers)
        assert torch.equal(y, F.linear(x, dense_of(values, columns, pointers, 90)))
        with use_kernel("reference"):
            assert "operation by operation" in explain_blocks(asked)[-1][1]
            torch.testing.assert_close(block_linear(x, values, columns, None, 90, pointers), y, atol=1e-4, rtol=1e-4)
    finally:
        block_crossover.slower_sparsity.cache_clear()
