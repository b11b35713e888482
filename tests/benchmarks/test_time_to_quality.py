"""Runs write logs that the official checker passes, verdicts are in words, and seconds of a busy machine are gone."""

import json
import math
from types import SimpleNamespace

import pytest

from benchmarks import throughput as several
from benchmarks import time_to_quality as bench
from benchmarks.record import Record
from benchmarks.throughput import throughput
from hf_lowbit.training.compliance import check_log, derive_rules
from hf_lowbit.training.mllog import LogFile


TARGET = 5.6


@pytest.mark.parametrize("method", ["dqt-8-ternary-forward", "blast"])
def test_a_run(method, monkeypatch, tmp_path):
    pytest.importorskip("mlperf_logging")
    # uniform bytes cost 5.55 nats, so that a few steps reach this target
    monkeypatch.setattr(bench, "PRUNING", {"step_size": 1, "total_steps": 2})
    log = tmp_path / "result_0.txt"
    found = bench.train(method, 0, log, steps=4, every=2, target=TARGET)
    assert found["samples"] == 2 * bench.BATCH and found["quality"][-1][1] <= TARGET
    assert found["sparsity"] == (0.75 if method == "blast" else 0.0)
    rules = derive_rules(tmp_path / "rules", bench.BENCHMARK, TARGET)
    verdict = check_log(log, rules)
    assert verdict.passed, verdict.output


def rows(**counts):
    """A row a seed, with samples to the target."""
    common = {"model_bytes": 1000, "peak_rss_mib": 500}
    return {f"{method}/seed{seed}": {"samples": samples, **common}
            for method, found in counts.items() for seed, samples in enumerate(found)}  # fmt: skip


def test_verdicts():
    reference = [1600.0, 1520.0, 1680.0, 1600.0, 1760.0, 1600.0, 1520.0, 1680.0]
    assert bench.judge(reference, [1700.0, 1600.0, 1650.0, 1800.0]) == "slower than the reference"
    assert bench.judge(reference, [1600.0, 1600.0, 1600.0, 1600.0]) == "within the reference's spread"
    assert bench.judge(reference, [800.0, 800.0, 800.0, 800.0]) == "sooner than luck allows"
    assert bench.judge(reference, [800.0, 800.0, math.inf, math.inf]) == "target not reached"
    assert bench.judge([1600.0], [1600.0] * 3) == "no reference yet"


def test_the_summary_has_methods_with_three_runs():
    text = bench.summary(rows(fp32=[1600, 1520, 1680, None], bitnet=[1600, 1600, 1600], bf16=[1600]))
    lines = text.splitlines()
    assert len(lines) == 3 and "1640" in lines[1] and "reference" in lines[1]
    assert "within the reference's spread" in lines[2]


@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "busy"])
def test_seconds_are_those_of_a_quiet_machine(quiet, monkeypatch, tmp_path):
    answer = json.dumps({"samples": 160, "seconds": 3.0})
    monkeypatch.setattr(bench.subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=0, stdout=answer))
    monkeypatch.setattr(bench, "is_quiet", lambda others: quiet)
    found = bench.measure("fp32", 0, tmp_path)
    assert (found["seconds"], found["quiet"], found["samples"]) == (3.0 if quiet else None, quiet, 160)


def test_only_runs_of_a_busy_machine_are_measured_again(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "Record", lambda name, protocol, restart, timed: Record(
        name, protocol, restart, folder=tmp_path, timed=timed))  # fmt: skip
    monkeypatch.setattr(bench, "WAYS", {"fp32": bench.WAYS["fp32"]})
    measured, quiet = [], False

    def measure(method, seed, logs):
        measured.append(seed)
        return {"samples": 160, "seconds": None, "quiet": quiet, "model_bytes": 1, "peak_rss_mib": 1}

    monkeypatch.setattr(bench, "measure", measure)
    given = {"restart": False, "minutes": 1, "logs": tmp_path, "again": False}
    bench.main(SimpleNamespace(**given))
    bench.main(SimpleNamespace(**given))
    assert measured == list(range(8))
    quiet = True
    bench.main(SimpleNamespace(**{**given, "again": True}))
    bench.main(SimpleNamespace(**{**given, "again": True}))
    assert measured == 2 * list(range(8))


def log_of(folder, seed, start, stop, status="success", benchmark="mine"):
    path = folder / f"{len(list(folder.iterdir()))}.txt"
    log = LogFile(path)
    log.write("submission_benchmark", benchmark)
    log.write("seed", seed)
    log.write("run_start", time_ms=start)
    log.write("eval_accuracy", 0.5, time_ms=stop, samples_count=10)
    log.write("run_stop", time_ms=stop, status=status)
    return path


def test_throughput_of_instances(tmp_path):
    logs = [log_of(tmp_path, 0, 1000, 21_000), log_of(tmp_path, 1, 3000, 41_000)]
    found = throughput(logs)
    assert (found.instances, found.counted, found.seconds) == (2, 2, 40.0) and found.models_an_hour == 180
    # the same seed again, and one that did not arrive
    logs += [log_of(tmp_path, 1, 0, 90_000), log_of(tmp_path, 2, 0, 99_000, status="aborted")]
    assert throughput(logs) == several.Throughput(4, 2, 40.0)
    assert throughput(logs[-1:]).models_an_hour == 0
    with pytest.raises(ValueError, match="2 benchmarks"):
        throughput([*logs, log_of(tmp_path, 3, 0, 1, benchmark="other")])


@pytest.mark.slow
def test_two_real_instances(tmp_path):
    found = several.run("fp32", 2, tmp_path)
    assert (found.instances, found.counted) == (2, 2) and found.seconds > 0
