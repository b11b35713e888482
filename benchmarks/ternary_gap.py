"""Why weights that are stored ternary fall behind, and what closes the gap: one change at a time.

    python -m benchmarks.ternary_gap --minutes 20     # continues where the last run stopped

The model, text, schedule and measure are those of benchmarks/direct_training.py (0.3M parameters, 400 steps). Each
way has one seed, so differences of about 0.02 mean little.

    fixed                   absmean scale a row, as made at the start
    learned                 the scale is trained (by factors)
    fixed, groups of 32     a scale for 32 weights
    learned, groups of 32   both
    annealed noise          r = 1/2 + a (u - 1/2), a from 1 to 0 with the learning rate: rounding to nearest at the end
    error feedback          what rounding left of a step is added to the next one; kept in float32, so it saves no
                            memory, but tells whether lost steps are what the gap is made of
    small start             half the absmean scale at the start, learned

Writes benchmarks/results/ternary_gap.json; docs/training.md quotes it.
"""

import argparse
import statistics
import time
from contextlib import contextmanager

import torch
from tqdm import tqdm
from transformers.utils import logging

from benchmarks import scratch_models
from benchmarks.direct_training import TEST, VALIDATION
from benchmarks.record import Record, watch
from benchmarks.scratch_models import CONTEXT, SIZES, Run, held_out, loss, train, train_text
from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.training import leaves


SIZE, STEPS, SEEDS = "0.3M", 400, (0,)
LEARNED = {"bits": "ternary", "scale": "learned"}
GROUPS = {"group_size": 32}
# way -> (fields of DQTConfig, windows a batch, change of the update, learning rates)
WAYS = {
    "fp32": (None, 8, None, (3e-3,)),
    "learned": (LEARNED, 8, None, (1e-2, 3e-2)),
    "learned, groups of 32": ({**LEARNED, **GROUPS}, 8, None, (1e-2, 3e-2)),
    "error feedback": (LEARNED, 8, "feedback", (1e-2,)),
    "annealed noise": (LEARNED, 8, "anneal", (1e-2,)),
    "small start": (LEARNED, 8, "small", (1e-2,)),
    "fixed, groups of 32": ({"bits": "ternary", **GROUPS}, 8, None, (1e-2,)),
    "fixed": ({"bits": "ternary"}, 8, None, (1e-2,)),
}


class Feedback(leaves.CodesLeaf):
    """Adds what rounding left of the last step to this one. In levels: the codes may have met the end of the grid, and
    what lies beyond is dropped."""

    left = None

    def move(self, rows, step, decay, words):
        if self.left is None:
            self.left = torch.zeros(self.rows, self.columns)
        own = slice(None) if self.parameter.scale.shape[0] == 1 else rows
        scale = leaves.expand_groups(self.parameter.scale[own].float(), self.columns, self.packed.scheme.block)
        wanted = step / scale + self.left[rows]
        before = self.codes(rows).float()
        moved = super().move(rows, wanted * scale, decay, words)
        self.left[rows] = (wanted - (self.codes(rows).float() - before)).clamp_(-1, 1)
        return moved


@contextmanager
def changed(change: str | None):
    """Make the change to the update inside the block. Changed updates are torch's: a kernel makes its own."""
    kept = leaves.CodesLeaf, leaves.round_step, scratch_models.build
    if change == "feedback":
        leaves.CodesLeaf = Feedback
    elif change == "anneal":
        leaves.round_step = Annealed(kept[1])
    elif change == "small":
        scratch_models.build = lambda *arguments: halved(kept[2](*arguments))
    try:
        if change in ("feedback", "anneal"):
            with use_kernel("reference"):
                yield
        else:
            yield
    finally:
        leaves.CodesLeaf, leaves.round_step, scratch_models.build = kept


class Annealed:
    """Rounding whose noise shrinks with the step: `fraction` of the run that is left."""

    fraction = 1.0

    def __init__(self, round_step):
        self.round_step = round_step

    def __call__(self, step, noise):
        return self.round_step(step, noise.sub(0.5).mul_(Annealed.fraction).add_(0.5))


def halved(model):
    """Half the scale: codes stay, weights are half as large."""
    from hf_lowbit.nn.arming import trainable_modules

    for _, module in trainable_modules(model):
        module.weight_scale.data.mul_(0.5)
    return model


def measure(way: str, rate: float, seed: int, data, validation, test) -> dict:
    fields, batch, change, _ = WAYS[way]
    run = Run(SIZE, "fp32" if fields is None else "ternary", rate, STEPS, seed)
    with watch() as spent, changed(change):
        Annealed.fraction = 1.0
        callbacks = {"seed": seed} if fields else {}
        if change == "anneal":
            model, logs = train_annealed(run, data, fields, batch)
        else:
            model, logs = train(run, data, fields, batch, **callbacks)
        figures = {
            "validation": statistics.fmean(loss(model, validation)),
            "test": statistics.fmean(loss(model, test)),
        }
    figures["train"] = [round(entry["loss"], 4) for entry in logs]
    for name in ("dqt/changed_rate", "dqt/saturation_rate", "dqt/scale_drift"):
        if name in logs[-1]:
            figures[name.removeprefix("dqt/")] = [float(f"{entry[name]:.3g}") for entry in logs]
    figures["seconds"] = round(spent.seconds, 1)
    return figures


def train_annealed(run, data, fields, batch):
    """As `train`, with the noise following the count of steps."""
    from hf_lowbit.training.updater import Updater

    begin = Updater.begin

    def count(self):
        begin(self)
        Annealed.fraction = max(0.0, 1 - self.state["step"] / run.steps)

    Updater.begin = count
    try:
        return train(run, data, fields, batch)
    finally:
        Updater.begin = begin


def key_of(way: str, rate: float, seed: int) -> str:
    return f"{way}/{rate:g}/seed{seed}"


def best_rate(record: Record, way: str) -> float | None:
    keys = {rate: key_of(way, rate, SEEDS[0]) for rate in WAYS[way][3]}
    if any(key not in record.rows for key in keys.values()):
        return None
    return min(keys, key=lambda rate: record.rows[keys[rate]]["validation"])


def runs(record: Record):
    for way, (_, _, _, rates) in WAYS.items():
        for rate in rates:
            yield way, rate, SEEDS[0]
        for seed in SEEDS[1:]:
            yield way, best_rate(record, way), seed


def main(arguments) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {
        "size": SIZES[SIZE], "steps": STEPS, "seeds": SEEDS, "context": CONTEXT,
        "ways": {way: str(value) for way, value in WAYS.items()},
        "train": "emma, sensesensibility, as bytes", "validation": VALIDATION, "test": TEST,
        "schedule": "cosine, a tenth warmup, clipping 1", "optimizer": "AdamW (0.9, 0.999), 32-bit states, no decay",
    }  # fmt: skip
    record = Record("ternary_gap", protocol, arguments.restart, timed=False)
    deadline = time.monotonic() + 60 * arguments.minutes
    data, validation, test = train_text(), held_out(*VALIDATION), held_out(*TEST)
    total = sum(len(rates) + len(SEEDS) - 1 for *_, rates in WAYS.values())
    print(f"{total} runs, of which {len(record.rows)} are done; a run takes about a minute on one core.")
    with tqdm(total=total) as bar:
        for way, rate, seed in runs(record):
            key = key_of(way, rate, seed)
            if key not in record.rows:
                if time.monotonic() > deadline:
                    print("time is up; run this again to continue.")
                    break
                bar.set_description(key)
                record.add(key, measure(way, rate, seed, data, validation, test))
                print(key, round(record.rows[key]["test"], 3), flush=True)
            bar.update()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--minutes", type=float, default=20)
    main(parser.parse_args())
