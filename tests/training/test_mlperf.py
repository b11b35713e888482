"""MLPerf logs of real Trainer runs: what is written, when, by whom; and what is refused."""

import json
import math

import pytest
import torch

import hf_lowbit as lb
from hf_lowbit.training.mllog import read_log, read_result
from hf_lowbit.training.staging import stage
from tests.training.countings import TARGET, Countings, build, run


# the log has whole milliseconds, the Trainer's time starts and ends elsewhere
TOLERANCE_MS = 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run that reaches the target."""
    folder = tmp_path_factory.mktemp("mlperf")
    (folder / "shard.bin").write_bytes(bytes(1000))
    staged = stage([folder / "shard.bin"], folder / "near")
    callback = lb.MLPerfCallback(folder / "result_0.txt", "hf_lowbit_counting", TARGET, staging=staged)
    trainer = run(folder, callback)
    return callback, trainer, read_log(callback.path)


def of(events, key):
    return [event for event in events if event.key == key]


def test_training_stops_at_the_first_evaluation_that_reaches_the_target(finished):
    callback, trainer, events = finished
    values = [event.value for event in of(events, "eval_accuracy")]
    assert values[-1] <= TARGET < min(values[:-1])
    assert trainer.state.global_step == 20 * len(values) < 200
    assert callback.reached and of(events, "run_stop")[0].metadata["status"] == "success"
    logged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert values == logged


def test_blocks_and_evaluations_touch_and_fill_the_run(finished):
    _, _, events = finished
    order = [e.key for e in events if e.key.startswith(("block", "eval_st", "eval_acc", "run"))]
    count = len(of(events, "eval_start"))
    cycle = ["block_start", "block_stop", "eval_start", "eval_stop", "eval_accuracy"]
    assert order == ["run_start", *cycle * count, "run_stop"]
    times = [e.time_ms for e in events if e.key.startswith(("block", "eval_st", "eval_acc", "run"))]
    assert times == sorted(times)
    whole = of(events, "run_stop")[0].time_ms - of(events, "run_start")[0].time_ms
    pairs = [*zip(of(events, "block_start"), of(events, "block_stop"), strict=True)]
    pairs += zip(of(events, "eval_start"), of(events, "eval_stop"), strict=True)
    parts = sum(end.time_ms - begin.time_ms for begin, end in pairs)
    assert abs(whole - parts) <= max(0.02 * whole, TOLERANCE_MS * (2 * count + 1))


def test_samples_are_counted_through_epochs_that_end_with_a_smaller_batch(finished):
    _, _, events = finished
    # 600 sequences are 18 batches of 32 and one of 24
    assert of(events, "eval_accuracy")[0].metadata["samples_count"] == 600 + 32
    assert of(events, "block_start")[0].metadata["samples_count"] == 0
    assert of(events, "block_start")[1].metadata["samples_count"] == 632
    # 20 of the 19 steps of an epoch; epochs count from 1
    starts = [(e.metadata["first_epoch_num"], e.metadata["epoch_count"]) for e in of(events, "block_start")]
    assert starts[:2] == [(1, 20 / 19), (2, 20 / 19)]


def test_what_is_disclosed(finished):
    _, _, events = finished
    values = {event.key: event.value for event in events}
    assert values["train_samples"] == 600 and values["eval_samples"] == 64
    assert values["global_batch_size"] == values["micro_batch_size"] == 32
    assert values["lowest_numerical_precision_in_linear"] == values["lowest_numerical_precision_in_comm"] == "fp32"
    assert values["hf_lowbit_weight_format"] == "float32"
    assert "unofficial" in values["hf_lowbit_note"] and values["submission_org"] == "unofficial"
    assert values["seed"] == 1 and values["submission_division"] == "open"
    for event in events:
        # no path of a machine
        assert not event.metadata["file"].startswith("/") and event.metadata["file"].startswith("hf_lowbit/")


def test_staging_is_logged_before_the_clock_starts(finished):
    _, _, events = finished
    (start,), (stop,), (run_start,) = (of(events, key) for key in ("staging_start", "staging_stop", "run_start"))
    assert start.time_ms <= stop.time_ms <= run_start.time_ms
    assert stop.metadata["bytes"] == 1000 and stop.metadata["files"] == 1
    assert events.index(stop) < events.index(run_start)


def test_result(finished):
    callback, _, events = finished
    result = read_result(callback.path)
    assert result.reached and 0 < result.seconds < 60 and result.benchmark == "hf_lowbit_counting"
    assert result.samples == of(events, "eval_accuracy")[-1].metadata["samples_count"]


def test_an_aborted_run_has_no_time(tmp_path):
    callback = lb.MLPerfCallback(tmp_path / "log", "counting", 1e-9)
    run(tmp_path, callback, max_steps=30)
    events = read_log(callback.path)
    assert of(events, "run_stop")[0].metadata["status"] == "aborted" and not callback.reached
    # the Trainer evaluates at the end too
    assert [e.metadata["samples_count"] for e in of(events, "eval_accuracy")] == [632, 600 + 11 * 32]
    assert read_result(callback.path).seconds == math.inf


def test_a_run_may_go_on_after_the_target(tmp_path):
    callback = lb.MLPerfCallback(tmp_path / "log", "counting", 100.0, stop_at_target=False)
    trainer = run(tmp_path, callback, max_steps=40)
    assert trainer.state.global_step == 40
    events = read_log(callback.path)
    assert events[-1].key == "run_stop" and len(of(events, "eval_accuracy")) == 1
    trainer.evaluate()
    assert len(read_log(callback.path)) == len(events)


def accuracy(prediction):
    found = prediction.predictions.argmax(-1)[:, :-1]
    return {"accuracy": float((found == prediction.label_ids[:, 1:]).mean())}


def test_other_metrics_and_evaluation_by_epoch(tmp_path):
    from transformers import Trainer

    from tests.training.runs import arguments

    callback = lb.MLPerfCallback(tmp_path / "log", "counting", 0.8, metric="accuracy")
    args = arguments(tmp_path, max_steps=-1, num_train_epochs=10, per_device_train_batch_size=32, learning_rate=1e-2,
                     eval_strategy="epoch", gradient_accumulation_steps=2)  # fmt: skip
    trainer = Trainer(model=build(), args=args, train_dataset=Countings(), eval_dataset=Countings(64, 7),
                      compute_metrics=accuracy, callbacks=[callback])  # fmt: skip
    trainer.train()
    result = read_result(callback.path)
    assert result.reached and result.quality[-1][1] >= 0.8 and result.samples % 600 == 0
    values = {event.key: event.value for event in read_log(callback.path)}
    assert values["global_batch_size"] == 64 and values["micro_batch_size"] == 32


def test_several_evaluation_sets_and_an_evaluation_at_the_start(tmp_path):
    sets = {"near": Countings(16, 1), "far": Countings(24, 9)}
    callback = lb.MLPerfCallback(tmp_path / "log", "counting", 1e-9, metric="far_loss")
    run(tmp_path, callback, max_steps=4, eval_steps=2, evaluation=sets, eval_on_start=True)
    events = read_log(callback.path)
    assert [e.metadata["samples_count"] for e in of(events, "eval_accuracy")] == [0, 64, 128]
    assert [e.value for e in of(events, "eval_samples")] == [24]
    for key in ("block", "eval"):
        assert len(of(events, f"{key}_start")) == len(of(events, f"{key}_stop"))
    callback = lb.MLPerfCallback(tmp_path / "first", "counting", 1e-9, metric="near_loss")
    run(tmp_path, callback, max_steps=4, eval_steps=2, evaluation=sets)
    assert len(of(read_log(callback.path), "eval_accuracy")) == 2


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        pytest.param(None, {"bf16": True}, ("bfloat16", "bfloat16", "fp32", "float32"), id="autocast"),
        pytest.param(lb.DQTConfig(bits=8), {}, ("fp32", "fp32", "fp32", "8 bits, float32"), id="dqt-8"),
        pytest.param(lb.DQTConfig(bits="ternary", activation_bits=8), {}, ("int8", "fp32", "fp32", "float32, ternary"),
                     id="ternary-int8"),
        pytest.param(lb.DQTConfig(bits=2), {"bf16": True}, ("bfloat16", "bfloat16", "fp32", "2 bits, float32"),
                     id="unpacked-to-bfloat16"),
        pytest.param(lb.DQTConfig(bits="ternary"), {"bf16": True}, None, id="ternary-autocast"),
    ],
)  # fmt: skip
def test_precision_is_what_is_executed(config, fields, words, tmp_path):
    model = build() if config is None else lb.quantize(build(), config)
    callback = lb.MLPerfCallback(tmp_path / "log", "counting", 1e-9)
    others = [] if config is None else [lb.DQTCallback()]
    run(tmp_path, callback, *others, model=model, max_steps=2, eval_steps=2, **fields)
    values = {event.key: event.value for event in read_log(callback.path)}
    found = tuple(values[f"lowest_numerical_precision_in_{part}"] for part in ("linear", "attn", "comm"))
    if words is None:
        activations = {m.lowbit["weight"].scheme.activations for m in model.modules() if getattr(m, "lowbit", False)}
        words = ("int8" if "int8" in activations else "bfloat16", "bfloat16", "fp32", "float32, ternary")
    assert (*found, values["hf_lowbit_weight_format"]) == words


def test_precision_and_keys_can_be_corrected(tmp_path):
    callback = lb.MLPerfCallback(tmp_path / "log", "counting", 1e-9, precision={"comm": "bfloat16"},
                                 extra={"tensor_parallelism": 2}, config_filename="x.yaml")  # fmt: skip
    run(tmp_path, callback, max_steps=1, eval_steps=1)
    values = {event.key: event.value for event in read_log(callback.path)}
    assert values["lowest_numerical_precision_in_comm"] == "bfloat16"
    assert values["tensor_parallelism"] == 2 and values["config_filename"] == "x.yaml"


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        pytest.param({"benchmark": "a b"}, ValueError, "`benchmark`='a b'", id="name"),
        pytest.param({"benchmark": ""}, ValueError, "`benchmark`=''", id="no-name"),
        pytest.param({"target": float("nan")}, ValueError, "`target`=nan", id="nan"),
        pytest.param({"target": "0.5"}, TypeError, "`target`='0.5'", id="text"),
        pytest.param({"target": True}, TypeError, "`target`=True", id="bool"),
        pytest.param({"division": "half-open"}, ValueError, "`division`", id="division"),
        pytest.param({"precision": {"mlp": "int8"}}, ValueError, "'mlp'", id="part"),
        pytest.param({"precision": {"attn": 8}}, ValueError, "`precision`", id="word"),
    ],
)
def test_bad_arguments(fields, error, match, tmp_path):
    with pytest.raises(error, match=match):
        lb.MLPerfCallback(**{"path": tmp_path / "log", "benchmark": "counting", "target": 0.5, **fields})


def test_a_log_is_never_written_over(tmp_path):
    (tmp_path / "log").write_text("precious")
    with pytest.raises(FileExistsError, match="A log is one run"):
        lb.MLPerfCallback(tmp_path / "log", "counting", 0.5)
    callback = lb.MLPerfCallback(tmp_path / "other", "counting", 1e-9)
    trainer = run(tmp_path, callback, max_steps=1, eval_steps=1)
    with pytest.raises(FileExistsError, match="A log is one run"):
        trainer.train()
    assert (tmp_path / "log").read_text() == "precious"


def test_runs_without_evaluation_or_metric_or_size_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`eval_strategy`"):
        run(tmp_path, lb.MLPerfCallback(tmp_path / "a", "counting", 0.5), eval_strategy="no")
    with pytest.raises(ValueError, match="`eval_accuracy`; there are .*eval_loss"):
        run(tmp_path, lb.MLPerfCallback(tmp_path / "b", "counting", 0.5, metric="accuracy"), eval_steps=1)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(Countings(64))

    with pytest.raises(ValueError, match="`train_samples`"):
        run(tmp_path, lb.MLPerfCallback(tmp_path / "c", "counting", 0.5), train=Stream())
    callback = lb.MLPerfCallback(tmp_path / "d", "counting", 1e-9, train_samples=64)
    run(tmp_path, callback, train=Stream(), max_steps=2, eval_steps=1)
    assert [e.metadata["samples_count"] for e in of(read_log(tmp_path / "d"), "eval_accuracy")] == [32, 64]


def test_a_resumed_run_is_refused(tmp_path):
    first = lb.MLPerfCallback(tmp_path / "first", "counting", 1e-9)
    trainer = run(tmp_path / "out", first, max_steps=2, eval_steps=1, save_strategy="steps", save_steps=1)
    trainer.remove_callback(first)
    trainer.add_callback(lb.MLPerfCallback(tmp_path / "second", "counting", 1e-9))
    trainer.args.max_steps = 4
    with pytest.raises(ValueError, match="continues at step 2"):
        trainer.train(resume_from_checkpoint=True)
    assert not (tmp_path / "second").exists()


def test_logs_that_are_none(tmp_path):
    (tmp_path / "log").write_text("text\n:::MLLOG {not json\n")
    with pytest.raises(ValueError, match="line 2"):
        read_log(tmp_path / "log")
    (tmp_path / "log").write_text("")
    with pytest.raises(ValueError, match="submission_benchmark"):
        read_result(tmp_path / "log")


def test_lines_have_the_official_fields_in_order(finished):
    line = finished[0].path.read_text().splitlines()[0]
    assert line.startswith(":::MLLOG ")
    assert list(json.loads(line[9:])) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
