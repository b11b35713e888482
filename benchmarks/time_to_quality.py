"""Time and samples to a stated quality: what training at low precision costs or brings, as MLPerf measures it.

    python -m benchmarks.time_to_quality              # continues where the last run stopped, 20 minutes at most
    python -m benchmarks.time_to_quality --restart

A byte-level Llama of `benchmarks/scratch_models.py` is trained from nothing until its loss on Northanger Abbey is at
most TARGET. Each run is a process of its own, so that its peak memory is its own, and writes an MLPerf-style log with
`MLPerfCallback`. The reference, float32, has twice the runs of a method; `benchmarks/convergence.py` says whether a
method arrived sooner than luck allows. Learning rates are those that `benchmarks/direct_training.py` chose.

Samples to the target do not depend on how busy the machine is; seconds do. A row's `seconds` are null when others used
the processor meanwhile (`quiet`: false), or when it is another one than the file's; `--again` measures those anew.

BLaST reaches its sparsity long before the target, so that the target is reached sparse (`sparsity`, when the run
ended). BLaST with direct updates of the live blocks is not here: `lb.BlastCallback` rounds them at the end only.

Writes benchmarks/results/time_to_quality.json, and the logs, which the official checker reads, to a folder (--logs).
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from benchmarks.convergence import can_compare, compare_with_reference, olympic
from benchmarks.record import ROOT, Record, is_quiet, machine, watch
from benchmarks.scratch_models import BATCH, CONTEXT, METHODS, SIZES, Windows, as_bytes, build, train_text


# method -> (how the weights are held, learning rate, bfloat16 autocast)
WAYS = {
    "fp32": ("fp32", 3e-3, False),
    "bf16": ("fp32", 3e-3, True),
    "bitnet": ("bitnet", 3e-3, False),
    "dqt-8": ("dqt-8", 3e-3, False),
    "dqt-8-ternary-forward": ("dqt-8-ternary-forward", 1e-2, False),
    "dqt-ternary": ("dqt-ternary", 1e-2, False),
    "blast": ("blast", 3e-3, False),
}
# three of four blocks of 8 x 8 are gone at step 60, and masks stay what they are from then on
BLAST, PRUNING = {"sparsity": 0.75, "block_size": 8}, {"step_size": 10, "total_steps": 80}
REFERENCE, RUNS = "fp32", 4
SIZE, STEPS, EVERY = "0.3M", 400, 10
VALIDATION, TARGET = ("northangerabbey", 32), 2.3
BENCHMARK = "hf_lowbit_austen_bytes"


def seeds(method: str) -> list[int]:
    """Seeds of a method's runs; the reference has twice as many."""
    return list(range(2 * RUNS if method == REFERENCE else RUNS))


def make(held: str, seed: int):
    """(model, callbacks that train it) of one way to hold weights."""
    import hf_lowbit as lb

    if held == "blast":
        return lb.quantize(build(SIZE, "fp32", seed), lb.BlastConfig(**BLAST)), [lb.BlastCallback(**PRUNING)]
    return build(SIZE, held, seed), [] if METHODS[held][0] is None else [lb.DQTCallback()]


def train(method: str, seed: int, log: Path, steps: int = STEPS, every: int = EVERY, target: float = TARGET) -> dict:
    """One run in this process: what its log says, and bytes."""
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    import hf_lowbit as lb
    from hf_lowbit.training.mllog import read_result

    held, rate, bf16 = WAYS[method]
    callback = lb.MLPerfCallback(log, BENCHMARK, target, config_filename="benchmarks/time_to_quality.py")
    model, callbacks = make(held, seed)
    evaluation = Windows(as_bytes([VALIDATION[0]]), VALIDATION[1], 0)
    evaluation.starts = [index * CONTEXT for index in range(VALIDATION[1])]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=rate, bf16=bf16,
            lr_scheduler_type="cosine", warmup_steps=steps // 10, max_grad_norm=1.0, use_cpu=True, seed=seed,
            per_device_eval_batch_size=16, eval_strategy="steps", eval_steps=every, save_strategy="no",
            weight_decay=0.0, report_to="none", disable_tqdm=True, logging_steps=steps, log_level="error",
            optim="adamw_torch",
        )  # fmt: skip
        data = Windows(train_text(), steps * BATCH, seed)
        trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=evaluation,
                          callbacks=[*callbacks, callback])  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    result = read_result(log)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    return {
        "samples": result.samples if result.reached else None, "seconds": result.seconds if result.reached else None,
        "quality": [[count, round(value, 4)] for count, value in result.quality], "model_bytes": weights,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "sparsity": round(callbacks[0].sparsity, 4) if held == "blast" else 0.0,
    }  # fmt: skip


def measure(method: str, seed: int, logs: Path) -> dict:
    """One run in a process of its own."""
    log = logs / method / f"result_{seed}.txt"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.time_to_quality", "--one", method, str(seed), str(log)]
    with watch() as spent:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{method}, seed {seed}:\n{done.stderr}")
    figures = json.loads(done.stdout.splitlines()[-1])
    figures["others"] = None if spent.others is None else round(spent.others, 2)
    figures["quiet"] = is_quiet(spent.others)
    if not figures["quiet"]:
        figures["seconds"] = None
    return figures


def samples_of(rows: dict, method: str) -> list[float]:
    """Samples to the target of a method's runs; infinite where it was not reached."""
    found = [rows[f"{method}/seed{seed}"]["samples"] for seed in seeds(method) if f"{method}/seed{seed}" in rows]
    return [math.inf if count is None else count for count in found]


def summary(rows: dict) -> str:
    lines = [f"{'method':24}{'runs':>5}{'samples to target':>19}{'verdict':>34}{'model kB':>10}{'peak MiB':>10}"]
    reference = samples_of(rows, REFERENCE)
    for method in WAYS:
        counts = samples_of(rows, method)
        if len(counts) < 3:
            continue
        first = rows[f"{method}/seed0"]
        told = "reference" if method == REFERENCE else judge(reference, counts)
        lines.append(
            f"{method:24}{len(counts):>5}{olympic(counts):>19.0f}{told:>34}{first['model_bytes'] / 1000:>10.0f}"
            f"{first['peak_rss_mib']:>10}"
        )
    return "\n".join(lines)


def judge(reference: list[float], counts: list[float]) -> str:
    """The verdict in words."""
    if len(reference) < 3:
        return "no reference yet"
    if not can_compare(reference, counts):
        return "too few runs to judge"
    verdict = compare_with_reference(reference, counts)
    if not math.isfinite(verdict.mean):
        return "target not reached"
    if not verdict.accepted:
        return "sooner than luck allows"
    return "slower than the reference" if verdict.mean > verdict.reference else "within the reference's spread"


def main(arguments) -> None:
    protocol = {
        "size": SIZES[SIZE], "steps": STEPS, "every": EVERY, "target": TARGET, "validation": VALIDATION,
        "ways": WAYS, "blast": [BLAST, PRUNING], "runs": RUNS, "reference": REFERENCE, "context": CONTEXT,
        "batch": BATCH,
        "train": "emma, sensesensibility, as bytes", "schedule": "cosine, a tenth warmup, clipping 1",
    }  # fmt: skip
    # samples are the figure; another machine may continue it, without seconds
    record = Record("time_to_quality", protocol, arguments.restart, timed=False)
    same = machine()["cpu"] == record.content["machine"]["cpu"]
    jobs = [(method, seed) for seed in range(2 * RUNS) for method in WAYS if seed in seeds(method)]
    print(f"{len(jobs)} runs, of which {len(record.rows)} are done; half a minute to a minute each on one core.")
    deadline = time.monotonic() + 60 * arguments.minutes
    for method, seed in tqdm(jobs):
        row = record.rows.get(f"{method}/seed{seed}")
        if row and not (arguments.again and same and not row["quiet"]):
            continue
        if time.monotonic() > deadline:
            print("time is up; run this again to continue.")
            break
        figures = measure(method, seed, arguments.logs)
        record.add(f"{method}/seed{seed}", figures if same else {**figures, "seconds": None})
    print(summary(record.rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--again", action="store_true", help="measure again what was measured on a busy machine")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "hf_lowbit_time_to_quality")
    parser.add_argument("--one", nargs=3, metavar=("METHOD", "SEED", "LOG"), help="one run, in this process")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(train(given.one[0], int(given.one[1]), Path(given.one[2]))))
    else:
        main(given)
