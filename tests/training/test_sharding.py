"""Gradients and states shared out over two processes by rows: the codes of a run that shares nothing out."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.functional.noise import column_words, key_of, row_words, shifted
from hf_lowbit.training.shards import RowGradient, Shards
from tests.processes import run_two, saved
from tests.training.runs import different
from tests.training.shard_worker import batch, odd, step_odd


JOBS = (
    "trainer",
    "conv1d",
    "clipped",
    "resume",
    "best",
    "late",
    "add_callback",
    "one",
    "branch",
    "reentrant",
    "nan",
    "state",
    "refused",
    "accelerate",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def results(folder):
    run_two("tests.training.shard_worker", str(folder), *JOBS)
    return saved(folder, *JOBS)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_row_has_one_owner(rows, world):
    owned = [r for rank in range(world) for r in range(*Shards(rank, world).own(rows).indices(rows))]
    assert owned == list(range(rows))


@pytest.mark.parametrize("first", [0, 5, 2**31 - 3, 2**32 - 1])
def test_a_shard_draws_the_noise_of_the_whole(first):
    key = key_of(1, 2, "w")
    moved = shifted(key, first)
    assert torch.equal(row_words(moved, 0, 9), row_words(key, first, first + 9))
    assert torch.equal(column_words(moved, 9), column_words(key, 9)) and -(2**31) <= moved.rows < 2**31


def test_a_gradient_of_rows_refuses_what_needs_the_whole():
    grad = RowGradient(torch.ones(2, 3), Shards(0, 2), torch.Size((4, 3)))
    assert grad.shape == (4, 3) and grad.mul_(2).local.sum() == 12
    for attempt in (lambda: grad + 1, lambda: grad.sum(), lambda: torch.ones(4, 3).mul_(grad)):
        with pytest.raises(RuntimeError, match="shared out"):
            attempt()
    with pytest.raises(RuntimeError, match="order 0"):
        torch.linalg.vector_norm(grad, 0)


def test_trainer_has_the_codes_of_a_run_that_shares_nothing_out(results):
    for process in results["trainer"]:
        whole, shared = process[False], process[True]
        assert different(whole["model"], shared["model"]) == []
        assert whole["changed"] == shared["changed"] > 0
        for one, other in zip(whole["logs"], shared["logs"], strict=True):
            # levels are summed in another order
            assert one.keys() == other.keys() and all(math.isclose(one[k], other[k], rel_tol=1e-6) for k in one)
        # half the states of the codes, all of the learned scales
        assert shared["bytes"] < 0.52 * whole["bytes"]


def test_conv1d_weights(results):
    one, other = results["conv1d"]
    assert different(one[0], one[1]) == different(other[0], other[1]) == different(one[1], other[1]) == []


def test_clipping_is_by_the_global_norm(results):
    for process in results["clipped"]:
        whole, shared = process[False], process[True]
        # summed in another order: rows apart, and passes averaged before they are added
        assert shared["norms"] == pytest.approx(whole["norms"], rel=1e-3) and min(whole["norms"]) > 0.1
        codes = [name for name, tensor in whole["model"].items() if tensor.dtype == torch.int8]
        moved = sum(int((whole["model"][n] != shared["model"][n]).sum()) for n in codes)
        assert moved < 0.01 * sum(whole["model"][n].numel() for n in codes)
    one, other = results["clipped"]
    assert different(one[True]["model"], other[True]["model"]) == []


def test_checkpoints_are_whole_and_go_on(results, folder):
    for whole, shared, again in results["resume"]:
        assert different(whole, shared) == different(whole, again) == []
    for step in (3, 6):
        one, other = (
            torch.load(folder / "resume" / run / f"checkpoint-{step}" / "optimizer.pt", weights_only=True)["state"]
            for run in ("whole", "shared")
        )
        one, other = one["hf_lowbit"], other["hf_lowbit"]
        assert {k: v for k, v in one.items() if k != "weights"} == {k: v for k, v in other.items() if k != "weights"}
        for name, tensors in one["weights"].items():
            assert different(as_tensors(tensors), as_tensors(other["weights"][name])) == []


def as_tensors(found):
    return {key: torch.as_tensor(value) for key, value in found.items()}


def test_a_checkpoint_loads_for_inference(results, folder):
    made = AutoModelForCausalLM.from_pretrained(folder / "resume" / "shared" / "checkpoint-6")
    assert different(made.state_dict(), results["resume"][0][1]) == []


def test_the_best_checkpoint_is_whole(results):
    weights = results["best"][0]
    assert weights["model.layers.0.mlp.up_proj.weight"]["m"].shape == (96, 64)


def test_a_checkpoint_that_was_not_announced_is_an_error(results):
    for message in results["late"]:
        assert "lacks the states of the other processes" in message


def test_callback_that_came_after_the_trainer_was_made(results):
    for message in results["add_callback"]:
        assert "add_callback" in message


def test_two_processes_do_what_one_does(results):
    for process in results["one"]:
        assert different(process["alone"], process["shared"]) == []
    # 33, 7 and 1 rows, and 33 of the branch, in each of three steps
    assert [process["rows"] for process in results["one"]] == [[17, 17, 4, 1] * 3, [16, 16, 3, 0] * 3]


def test_a_weight_that_one_process_does_not_use(results):
    one, other = results["branch"]
    for whole, shared in (one, other):
        assert different(whole["model"], shared["model"]) == []
        assert whole["states"] == shared["states"] and "branch.weight" in shared["states"]
        assert "unused.weight" not in shared["states"]


def test_reentrant_checkpointing(results):
    for plain, reentrant in results["reentrant"]:
        assert different(plain, reentrant) == []


def test_nan_in_one_process_skips_the_step_in_both(results):
    for process in results["nan"]:
        assert process["skipped"] and different(process["before"], process["after"]) == []


def test_states_are_saved_whole_and_loaded_by_rows(results, folder):
    one, other = results["state"]
    for process in (one, other):
        assert different(*process["on"]) == [] and "consolidate_state_dict" in process["said"][0]
    assert "process 1 of 2" in other["said"][1]
    # one process goes on where two stopped
    alone = odd()
    optimizer = lb.DQTOptimizer(alone, lr=1e-2, state_bits=8)
    file = torch.load(folder / "state.pt", weights_only=True)
    alone.load_state_dict(file["model"])
    optimizer.load_state_dict(file["optimizer"])
    assert different(step_odd(alone, optimizer, batch(5)), one["on"][0]) == []


def test_refusals(results):
    wanted = ("before DistributedDataParallel", "needs the model", "release_gradients", "'lamb'", "wrap the model")
    for said in results["refused"]:
        assert len(said) == len(wanted) and all(w in s for w, s in zip(wanted, said, strict=True)), said


def test_accelerate_loop_with_accumulation_and_saved_state(results):
    one, other = results["accelerate"]
    assert different(one["model"], other["model"]) == []
    assert one["steps"] == other["steps"] == 2


def test_one_process_has_nothing_to_share_out():
    one, other = odd(), odd()
    whole = step_odd(one, lb.DQTOptimizer(one, lr=1e-2), batch(1))
    shared = step_odd(other, lb.DQTOptimizer(other, lr=1e-2, shard_states=True), batch(1))
    assert different(whole, shared) == []


@pytest.mark.parametrize("rule", ["adafactor", "lars", "lamb"])
def test_rules_that_need_whole_matrices(rule):
    with pytest.raises(ValueError, match="`shard_states`=True shares out rows"):
        lb.DQTCallback(rule, shard_states=True)
