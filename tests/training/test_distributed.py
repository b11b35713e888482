"""Two processes over gloo: identical replicas, with different data and different global generators."""

import pytest
import torch

import hf_lowbit as lb
from hf_lowbit.training.mllog import read_log, read_result
from tests.processes import run_two, saved
from tests.training.runs import Sentences, different, model, snapshot


JOBS = (
    "trainer:8-ternary-forward",
    "lars",
    "loop",
    "start",
    "diverged",
    "ranks_own_noise",
    "accelerate",
    "release",
    "mlperf",
)


def run(folder, *jobs):
    """Run jobs in two processes; what each process saved, by job."""
    run_two("tests.training.ddp_worker", str(folder), *jobs)
    return saved(folder, *jobs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def results(folder):
    return run(folder, *JOBS)


def test_trainer_keeps_replicas_identical_for_fifty_steps(results):
    one, other = results["trainer:8-ternary-forward"]
    assert different(one["model"], other["model"]) == []
    assert one["changed"] == other["changed"] > 0


def test_lars_keeps_replicas_identical_for_fifty_steps(results):
    one, other = results["lars"]
    assert different(one["model"], other["model"]) == []
    assert one["changed"] == other["changed"] > 0


@pytest.mark.slow
def test_trainer_in_other_modes(tmp_path):
    for job, (one, other) in run(tmp_path, "trainer:8-learned-scale", "trainer:ternary", "trainer:4-groups").items():
        assert different(one["model"], other["model"]) == [], job


def test_two_processes_do_what_one_does(results):
    one, other = results["loop"]
    assert different(one["model"], other["model"]) == []
    single = model(bits=8)
    optimizer = lb.DQTOptimizer(single, lr=2e-3)
    ids = Sentences().ids
    for step in range(4):
        part = ids[4 * step : 4 * step + 4]
        single(input_ids=part, labels=part).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # the same noise, so codes differ only where the order of sums decides
    alone = snapshot(single)
    codes = [name for name in alone if alone[name].dtype == torch.int8]
    changed = sum(int((alone[name] != one["model"][name]).sum()) for name in codes)
    assert changed < 0.01 * sum(alone[name].numel() for name in codes)


def test_processes_that_start_different_are_made_equal(results):
    one, other = results["start"]
    assert different(one["model"], other["model"]) == []
    assert different(one["model"], snapshot(model(bits=8))) == []


def test_a_replica_that_differs_in_one_code_is_found(results):
    for message in results["diverged"]:
        assert "different low-bit weights at step 7" in message and "[[0], [1]]" in message


def test_noise_of_each_ranks_own_is_found(results):
    for message in results["ranks_own_noise"]:
        assert "same `seed`" in message


def test_accelerate_loop_with_accumulation_and_saved_state(results):
    one, other = results["accelerate"]
    assert different(one["model"], other["model"]) == []
    # 16 sentences, 2 a batch, 2 processes, 2 batches an update, twice
    assert one["steps"] == 4


def test_release_of_gradients_is_refused(results):
    for message in results["release"]:
        assert "one process" in message


def test_mlperf_log_is_one_and_all_processes_stop_together(results, folder):
    one, other = results["mlperf"]
    assert (one["writes"], other["writes"]) == (True, False)
    assert one["reached"] and other["reached"] and one["step"] == other["step"] < 200
    assert different(one["model"], other["model"]) == []
    values = {event.key: event.value for event in read_log(folder / "mlperf.txt")}
    assert values["global_batch_size"] == one["batch"] == 64 and values["micro_batch_size"] == 32
    assert values["number_of_ranks"] == 2 and read_result(folder / "mlperf.txt").reached
