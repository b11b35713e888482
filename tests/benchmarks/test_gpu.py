"""The benchmark of GPU products: what can be said without a GPU; timing itself needs one."""

import json

import pytest
import torch

from benchmarks import gpu, gpu_plans, gpu_timing
from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.kernels.triton.plans import TABLES, Plan, complete, read_table


def test_without_a_device_it_says_so(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 0
    assert capsys.readouterr().out == "There is no CUDA device: nothing to measure.\n"


def test_results_are_named_after_the_card():
    assert gpu.slug("NVIDIA H200") == "nvidia-h200"
    assert gpu.slug("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"


@pytest.mark.parametrize("scheme", gpu.SCHEMES)
def test_every_scheme_is_a_product(scheme, monkeypatch):
    monkeypatch.setattr(gpu_timing, "MOST_LAYERS", 2)
    product = gpu.ours(gpu.SCHEMES[scheme], (32, 256), torch.device("cpu"))
    with torch.no_grad(), use_kernel("reference"):
        assert product(torch.randn(3, 256).bfloat16(), 1).shape == (3, 32)


def test_rings_exceed_the_cache():
    for shape in gpu.SHAPES:
        assert gpu_timing.ring_length(shape) * shape[0] * shape[1] / 4 >= 60e6


def test_a_busy_device_is_seen():
    assert gpu_timing.drift([1.0, 1.0, 1.0, 1.0]) == 0
    assert gpu_timing.drift([1.0, 1.0, 1.2, 1.2]) > gpu.DRIFT


def test_tables_are_what_tuning_would_write():
    for name in ("sm_80", "sm_90"):
        text = (TABLES / f"{name}.json").read_text()
        assert gpu_plans.render(name, json.loads(text)["origin"], read_table(name)) == text


def test_tuning_takes_the_fastest_that_runs(capsys):
    row = next(row for row in read_table("sm_90") if row["activations"] == "float" and row["max_rows"] == 64)
    cases = [gpu_plans.Case(4, 128, (4096, 4096), 64, False)]

    def seconds(plan: Plan, case: gpu_plans.Case) -> float:
        if plan.block_n == 256:
            raise RuntimeError("out of resource: shared memory")
        assert complete(plan, case.problem(), 132).part_steps > 0
        return (1.0 if plan.block_n == 64 else 2.0) + plan.stages / 100 + plan.block_k / 1e4 + plan.block_m / 1e5

    best = gpu_plans.best_plan(row, cases, seconds, float("inf"))
    assert (best.block_n, best.stages, best.block_k, best.block_m) == (64, 2, 64, 32)
    assert "left out" in capsys.readouterr().out


def test_tuning_that_runs_out_of_time_keeps_what_there_was():
    row = read_table("sm_90")[0]
    best = gpu_plans.best_plan(row, [gpu_plans.Case("ternary", "tensor", (64, 64), 1, True)], lambda *_: 1.0, 0.0)
    assert best == gpu_plans.candidates(row)[0]
