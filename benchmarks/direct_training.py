"""Direct training against float training and BitNet, from scratch on a novel: the quality table of docs/training.md.

    python -m benchmarks.direct_training              # continues where the last run stopped, 20 minutes at most
    python -m benchmarks.direct_training --restart    # from nothing

For each method: three learning rates with one seed, the best on Northanger Abbey is kept, and two more seeds with it.
Figures are of Persuasion. `benchmarks/scratch_models.py` holds models, data and methods.

Writes benchmarks/results/direct_training.json; docs/training.md quotes it.
"""

import argparse
import statistics
import time

from tqdm import tqdm
from transformers.utils import logging

from benchmarks.record import Record, watch
from benchmarks.scratch_models import BATCH, CONTEXT, METHODS, SIZES, Run, held_out, loss, train, train_text


RATES = (1e-3, 3e-3, 1e-2)
SEEDS = (0, 1, 2)
STEPS = {"0.3M": (400,)}
VALIDATION, TEST = ("northangerabbey", 64), ("persuasion", 256)


def best_rate(record: Record, size: str, steps: int, method: str) -> float:
    """The rate of the lowest validation loss of the first seed."""
    return min(RATES, key=lambda rate: record.rows[Run(size, method, rate, steps, SEEDS[0]).key]["validation"])


def runs(record: Record):
    """Every run, in order; later ones depend on the figures of earlier ones."""
    for size, horizons in STEPS.items():
        for steps in horizons:
            for method in METHODS:
                for rate in RATES:
                    yield Run(size, method, rate, steps, SEEDS[0])
            for seed in SEEDS[1:]:
                for method in METHODS:
                    yield Run(size, method, best_rate(record, size, steps, method), steps, seed)


def measure(run: Run, data, validation, test) -> dict:
    with watch() as spent:
        model, logs = train(run, data)
        nlls = loss(model, test)
        figures = {"validation": statistics.fmean(loss(model, validation)), "test": statistics.fmean(nlls)}
    figures["train"] = [round(entry["loss"], 4) for entry in logs]
    for name in ("dqt/changed_rate", "dqt/saturation_rate", "dqt/scale_drift"):
        if name in logs[-1]:
            figures[name.removeprefix("dqt/")] = [float(f"{entry[name]:.3g}") for entry in logs]
    figures["seconds"] = round(spent.seconds, 1)
    return figures


def summary(record: Record) -> str:
    lines = [f"{'model':8}{'steps':>7}  {'method':28}{'rate':>8}{'nats/byte':>11}{'spread':>9}{'changed':>10}"]
    for size, horizons in STEPS.items():
        for steps in horizons:
            for method in METHODS:
                if any(Run(size, method, rate, steps, SEEDS[0]).key not in record.rows for rate in RATES):
                    continue
                rate = best_rate(record, size, steps, method)
                keys = [Run(size, method, rate, steps, seed).key for seed in SEEDS]
                found = [record.rows[key] for key in keys if key in record.rows]
                tests = [figures["test"] for figures in found]
                changed = found[0].get("changed_rate")
                lines.append(
                    f"{size:8}{steps:>7}  {method:28}{rate:>8g}{statistics.fmean(tests):>11.3f}"
                    f"{max(tests) - min(tests):>9.3f}" + (f"{changed[len(changed) // 2]:>10.2%}" if changed else "")
                )
    return "\n".join(lines)


def main(arguments) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {
        "sizes": {size: SIZES[size] for size in STEPS}, "steps": STEPS, "rates": RATES, "seeds": SEEDS,
        "context": CONTEXT, "batch": BATCH, "methods": list(METHODS), "train": "emma, sensesensibility, as bytes",
        "validation": VALIDATION, "test": TEST, "optimizer": "AdamW (0.9, 0.999), states of 32 bits, no decay",
        "schedule": "cosine, a tenth warmup, clipping 1", "dtype": "float32",
    }  # fmt: skip
    record = Record("direct_training", protocol, arguments.restart, timed=False)
    total = sum(len(h) for h in STEPS.values()) * len(METHODS) * (len(RATES) + len(SEEDS) - 1)
    print(f"{total} runs, of which {len(record.rows)} are done; a run takes half a minute to two on one core.")
    deadline = time.monotonic() + 60 * arguments.minutes
    data, validation, test = train_text(), held_out(*VALIDATION), held_out(*TEST)
    with tqdm(total=total) as bar:
        for run in runs(record):
            if run.key not in record.rows:
                if time.monotonic() > deadline:
                    print("time is up; run this again to continue.")
                    break
                bar.set_description(run.key)
                record.add(run.key, measure(run, data, validation, test))
            bar.update()
    print(summary(record))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--minutes", type=float, default=20)
    main(parser.parse_args())
