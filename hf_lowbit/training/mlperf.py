"""`MLPerfCallback`: any Trainer run as an MLPerf log, and its end when the quality target is reached.

What MLPerf measures is the time from the first touch of the data to a stated quality, evaluations included (Mattson et
al. 2020). In the Trainer that is

    init_start   the callback is made          init_stop, run_start   training begins
    block_start .. block_stop                  steps between two evaluations
    eval_start .. eval_stop, eval_accuracy     an evaluation; a value that reaches the target ends the run
    run_stop     the moment the target is reached ("success"), or the end of training without it ("aborted")

Blocks and evaluations touch without gaps, so that saving and logging are on the clock; what the Trainer does after
`run_stop` is not. `samples_count` is what the model has been trained on so far.

Logs are "MLPerf-style (unofficial)" and say so: a result is MLPerf's only after its review.
"""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from pathlib import Path

import torch.distributed as dist
from transformers import TrainerCallback

from .mllog import LogFile, now_ms
from .precision import ORDER, PARTS, executed_precision, weight_formats
from .replicas import world_size


NOTE = "MLPerf-style (unofficial): not verified by MLCommons"


class MLPerfCallback(TrainerCallback):
    """Writes an MLPerf log of a training run and stops it at the target; pass it to `Trainer(callbacks=[...])`.

    Args:
        path: the log, such as "results/result_0.txt". Must not exist: a log is one run. Rank 0 writes it.
        benchmark: its name, letters, digits, "_" and "-". Names of MLPerf's own benchmarks are for testing only.
        target: the quality to reach, a finite number.
        metric: which of the Trainer's metrics (default "eval_loss"; "eval_" may be left out).
        greater_is_better: default: True unless the metric's name ends in "loss" or "perplexity".
        stop_at_target: end training when the target is reached (default True). The log ends there in any case.
        division: "open" (default) or "closed". organization, platform: free text; default "unofficial" and the
            processor's architecture and number of cores.
        staging: what `training.staging.stage` returned, to be logged before the clock starts.
        precision: corrections to what is found by itself, such as {"comm": "bfloat16"} under a communication hook;
            parts "linear", "attn", "comm", words of MLPerf's list.
        train_samples, eval_samples: sizes of the data sets, needed when they have no length.
        config_filename: what configures the run (default: the name of the script).
        cache_cleared: whether the operating system's cache of the data was emptied before (default False).
        extra: more keys to log, such as {"tensor_parallelism": 2}; they replace what is found.

    Attributes:
        reached: whether the target was reached.

    Raises:
        ValueError, TypeError: for values out of range; at the start of training, when nothing would be evaluated, when
            the run is resumed, or when the size of a data set is unknown; after the first evaluation, when it has no
            such metric. FileExistsError: when the log exists.
    """

    def __init__(
        self, path: str | os.PathLike, benchmark: str, target: float, metric: str = "eval_loss",
        greater_is_better: bool | None = None, stop_at_target: bool = True, division: str = "open",
        organization: str = "unofficial", platform: str | None = None, staging=None,
        precision: dict[str, str] | None = None, train_samples: int | None = None, eval_samples: int | None = None,
        config_filename: str | None = None, cache_cleared: bool = False, extra: dict | None = None,
    ):  # fmt: skip
        self.path, self.benchmark, self.target = Path(path), benchmark, target
        self.metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        if greater_is_better is None:
            greater_is_better = not self.metric.endswith(("loss", "perplexity"))
        self.greater_is_better, self.stop_at_target, self.staging = greater_is_better, stop_at_target, staging
        self.division, self.organization, self.platform = division, organization, platform or _platform()
        self.precision, self.extra = dict(precision or {}), dict(extra or {})
        self.train_samples, self.eval_samples = train_samples, eval_samples
        self.config_filename = config_filename or Path(sys.argv[0]).name or "interactive"
        self.cache_cleared, self.reached = cache_cleared, False
        self._check()
        self._created = now_ms()
        self._log: LogFile | None = None
        self._running = self._evaluating = False
        self._found_at: int | None = None
        self._seen: set[str] = set()

    def on_train_begin(self, args, state, control, model=None, train_dataloader=None, **kwargs):
        self._refuse(args, state)
        self._find_sizes(args, state, train_dataloader)
        self._seen, self._evaluating, self._found_at, self._running, self.reached = set(), False, None, True, False
        self._writes = state.is_world_process_zero
        if self._writes:
            self._refuse_existing()
            self._log = LogFile(self.path)
            self._describe(args, model)
        self._write("init_stop")
        self._write("run_start")
        self._start_block(state)

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_evaluate:
            self._start_evaluation(state)

    def on_epoch_end(self, args, state, control, **kwargs):
        if control.should_evaluate:
            self._start_evaluation(state)

    def on_prediction_step(self, args, state, control, **kwargs):
        # an evaluation that was not announced: `eval_on_start`, or another callback's wish
        if self._found_at != state.global_step:
            self._start_evaluation(state)

    def on_evaluate(self, args, state, control, metrics=None, eval_dataloader=None, **kwargs):
        if not self._running or self._found_at == state.global_step:
            # over, or another of several evaluation sets
            return
        self._start_evaluation(state)
        self._seen |= set(metrics)
        if self.metric not in metrics:
            return
        samples = self._samples(state)
        self._evaluating, self._found_at = False, state.global_step
        self._write("eval_stop", samples_count=samples, epoch_num=math.ceil(state.epoch or 0))
        if self.eval_samples is None:
            # the Trainer makes the loader when it evaluates for the first time
            self.eval_samples = _length(eval_dataloader, "eval_samples")
            self._write("eval_samples", self.eval_samples)
        value = float(metrics[self.metric])
        self._write("eval_accuracy", value, samples_count=samples, epoch_num=math.ceil(state.epoch or 0))
        if self._agree(value >= self.target if self.greater_is_better else value <= self.target):
            self.reached = True
            self._stop("success", samples)
            control.should_training_stop = control.should_training_stop or self.stop_at_target
        elif not control.should_training_stop:
            self._start_block(state)

    def on_step_begin(self, args, state, control, **kwargs):
        self._require_metric()

    def on_train_end(self, args, state, control, **kwargs):
        if not self._running:
            return
        self._require_metric()
        if self._in_block:
            self._stop_block(state)
        self._stop("aborted", self._samples(state))

    def _check(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.benchmark):
            raise ValueError(f"`benchmark`={self.benchmark!r} must consist of letters, digits, '_' and '-'.")
        if isinstance(self.target, bool) or not isinstance(self.target, (int, float)):
            raise TypeError(f"`target`={self.target!r} must be a number.")
        if not math.isfinite(self.target):
            raise ValueError(f"`target`={self.target!r} must be finite: nothing reaches it, or everything does.")
        if self.division not in ("open", "closed"):
            raise ValueError(f"`division`={self.division!r} must be 'open' or 'closed'.")
        for part, word in self.precision.items():
            if part not in PARTS:
                raise ValueError(f"`precision` has the part {part!r}; the parts are {', '.join(PARTS)}.")
            if not isinstance(word, str) or not word:
                raise ValueError(f"`precision`[{part!r}]={word!r} must be a word such as {', '.join(ORDER)}.")
        if int(os.environ.get("RANK", 0)) == 0:
            self._refuse_existing()

    def _refuse_existing(self) -> None:
        if self.path.exists():
            raise FileExistsError(f"`path`={str(self.path)!r} exists. A log is one run: name another, or remove it.")

    def _refuse(self, args, state) -> None:
        if state.global_step:
            raise ValueError(
                f"the run continues at step {state.global_step}: the time until the target is that of a whole run. "
                "Leave MLPerfCallback out, or start anew."
            )
        if str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "no":
            raise ValueError(
                f"nothing is evaluated, so `target`={self.target} is never seen: set `eval_strategy` and `eval_steps`."
            )
        if getattr(args, "auto_find_batch_size", False):
            raise ValueError("`auto_find_batch_size` begins a run several times; set the batch size.")

    def _find_sizes(self, args, state, loader) -> None:
        per_device = state.train_batch_size or args.train_batch_size
        self._batch = per_device * args.gradient_accumulation_steps * args.world_size
        if self.train_samples is None:
            self.train_samples = _length(loader, "train_samples")
        try:
            steps = -(-len(loader) // args.gradient_accumulation_steps)
        except TypeError:
            # a stream: every batch is whole
            steps = None
        self._steps_per_epoch = max(steps, 1) if steps else None
        # of a block; a stream is one epoch to the Trainer
        by_steps = str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "steps"
        self._epoch_count = state.eval_steps / (self._steps_per_epoch or state.max_steps) if by_steps else 1

    def _samples(self, state) -> int:
        """Trained on so far; the last batch of an epoch may be smaller."""
        if self._steps_per_epoch is None:
            return state.global_step * self._batch
        epochs, steps = divmod(state.global_step, self._steps_per_epoch)
        whole = min(self._steps_per_epoch * self._batch, self.train_samples)
        return epochs * whole + min(steps * self._batch, self.train_samples)

    def _describe(self, args, model) -> None:
        """All that is known before the clock starts."""
        found = {**executed_precision(model, args), **self.precision}
        values = {
            "submission_benchmark": self.benchmark, "submission_org": self.organization,
            "submission_division": self.division, "submission_platform": self.platform,
            "submission_status": "research", "hf_lowbit_note": NOTE, "cache_clear": self.cache_cleared,
            "seed": args.seed, "global_batch_size": self._batch, "train_samples": self.train_samples,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "micro_batch_size": args.per_device_train_batch_size, "config_filename": self.config_filename,
            "opt_base_learning_rate": args.learning_rate, "number_of_ranks": args.world_size,
            **{f"{kind}_parallelism": 1 for kind in ("tensor", "pipeline", "context", "expert")},
            **{f"lowest_numerical_precision_in_{part}": found[part] for part in PARTS},
            "hf_lowbit_weight_format": weight_formats(model), "hf_lowbit_target": self.target,
            "hf_lowbit_metric": self.metric, **self.extra,
        }  # fmt: skip
        for key, value in values.items():
            self._write(key, value)
        if self.eval_samples is not None:
            self._write("eval_samples", self.eval_samples)
        self._log.write("init_start", time_ms=self._created)
        if self.staging is not None:
            facts = self.staging.facts()
            self._log.write("staging_start", time_ms=self.staging.start_ms)
            self._log.write("staging_stop", time_ms=self.staging.stop_ms, **facts)

    def _write(self, key: str, value=None, **metadata) -> None:
        if self._writes:
            self._log.write(key, value, **metadata)

    def _start_block(self, state) -> None:
        self._in_block = True
        self._first_epoch = math.floor(state.epoch or 0) + 1
        epochs = {"first_epoch_num": self._first_epoch, "epoch_count": self._epoch_count}
        self._write("block_start", samples_count=self._samples(state), **epochs)

    def _stop_block(self, state) -> None:
        self._in_block = False
        self._write("block_stop", samples_count=self._samples(state), first_epoch_num=self._first_epoch)

    def _start_evaluation(self, state) -> None:
        if self._running and not self._evaluating:
            self._stop_block(state)
            self._evaluating, self._found_at = True, None
            self._write("eval_start", samples_count=self._samples(state), epoch_num=math.ceil(state.epoch or 0))

    def _stop(self, status: str, samples: int) -> None:
        self._running = False
        self._write("run_stop", status=status, samples_count=samples)

    def _require_metric(self) -> None:
        """After an evaluation: the metric was there."""
        if self._running and self._evaluating:
            raise ValueError(
                f"no evaluation has the metric `{self.metric}`; there are {sorted(self._seen)}. Correct `metric`, or "
                "give the Trainer `compute_metrics`."
            )

    def _agree(self, reached: bool) -> bool:
        """What rank 0 saw: processes that stop at different steps would wait for each other for ever."""
        if world_size() == 1:
            return reached
        answer = [reached]
        dist.broadcast_object_list(answer, src=0)
        return answer[0]


def _length(loader, argument: str) -> int:
    try:
        return len(loader.dataset)
    except (TypeError, AttributeError):
        raise ValueError(f"the size of the data set is unknown; give `{argument}`.") from None


def _platform() -> str:
    return f"{platform.machine() or 'unknown'}, {os.cpu_count()} cores"
