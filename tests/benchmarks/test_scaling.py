"""The model of time recovers what it was made from, and real processes give it what it needs."""

import math

import pytest

from benchmarks import scaling
from benchmarks.time_model import Constants, all_reduce, compute, errors, fit, fit_overlap, step, total


TRUE = Constants(0.01, 0.002, 1e-4, 1e9, overlap=0.3, gradient_bytes=8e6)


def test_the_formula():
    assert step(TRUE, 16, 1) == pytest.approx(0.01 + 0.002 * 16)
    traffic = 2 * (4 - 1) * (3 * 1e-4 + 8e6 / (4 * 1e9))
    assert all_reduce(TRUE, 8e6, 4, 3) == pytest.approx(traffic)
    assert step(TRUE, 16, 4, 3) == pytest.approx(0.01 + 0.002 * 4 + traffic - 0.3 * 0.002 * 4)
    # communication that the computation hides
    assert step(TRUE, 4000, 4, 1) == pytest.approx(compute(TRUE, 1000))
    # half the bytes, half the seconds but for the latency
    assert all_reduce(TRUE, 4e6, 2) == pytest.approx(2 * 1e-4 + 4e6 / 1e9)


def test_the_whole_run():
    slow = Constants(
        0.0, 1.0, 0.0, math.inf, storage_bandwidth=100.0, evaluation=5.0, sample_bytes=30, read_bandwidth=10
    )
    # 10 seconds of staging, 3 steps of 4 samples a process whose reading takes 12 seconds, two evaluations
    assert total(slow, 8, 2, 20, data_bytes=2000, evaluations=2) == pytest.approx(10 + 3 * 12 + 10)


def test_constants_are_recovered_from_exact_measurements():
    computes = {samples: compute(TRUE, samples) for samples in (2, 4, 8)}
    reduces = {size: all_reduce(TRUE, size, 2) for size in (1 << 16, 1 << 20, 1 << 24)}
    found = fit(computes, reduces, 2, gradient_bytes=8e6)
    measured = [
        (step(TRUE, batch, 2, b, share), batch, 2, b, share) for batch in (4, 8) for b, share in ((1, 1), (3, 0.5))
    ]
    found = fit_overlap(found, measured)
    for name in ("fixed", "per_sample", "latency", "bandwidth", "overlap"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert max(map(abs, errors(found, measured))) < 1e-9


def test_one_process_has_no_traffic_and_one_size_no_line():
    assert fit({1: 0.1, 2: 0.2}, {}, 1).bandwidth == math.inf
    with pytest.raises(ValueError, match="two sizes"):
        fit({1: 0.1}, {}, 1)


def test_the_plan_covers_strong_weak_buckets_and_hooks():
    plan = scaling.jobs(4)
    assert plan["strong/fp32/4"]["samples"] == 4 and plan["weak/dqt-8/4"]["samples"] == 8
    assert {key for key in plan if key.startswith("buckets/2/")} == {
        f"buckets/2/{size}/{hook}" for size in (1, 4, 25) for hook in ("fp32", "bf16")
    }
    assert {job["world"] for job in plan.values()} == {1, 2, 4}


@pytest.mark.slow
def test_two_real_processes():
    rows = {}
    small = {"size": "0.3M", "repeats": 2}
    for key in ("compute/fp32", "reduces/2", "weak/fp32/2", "weak/dqt-8/2", "buckets/2/1/bf16"):
        job = {**scaling.jobs(2)[key], **small}
        job = {**job, "samples": (1, 2)} if key.startswith("compute") else job
        job = {**job, "samples": 2} if job["kind"] == "steps" else job
        rows[key] = {**scaling.run(job), "job": job}
    assert all(row["replicas_equal"] for row in rows.values() if row["job"]["kind"] == "steps")
    constants = scaling.model_of(rows, "fp32")
    assert constants.per_sample > 0 and constants.gradient_bytes > 1e6
    assert "model error" in scaling.summary(rows)
