"""Which way to block sparsity costs least: held-out loss of a small Llama trained from nothing, at equal steps.

    python -m benchmarks.sparsity              # continues where the last run stopped, 20 minutes at most
    python -m benchmarks.sparsity --restart    # from nothing

Every method sees the same batches of a seed, the same optimizer and learning rate, and the same number of steps; the
MLPs end at exactly the same measured sparsity. They differ in when blocks go and in whether others come back:

    dense       no block is ever removed
    gradual     `BlastCallback` with a cubic schedule and no growth
    grow        the same schedule, a share of the blocks chosen by gradient ("budget")
    union       the same schedule, the best blocks by weight and the best by gradient
    one-shot    dense for half of the steps, then pruned to the target at once by norm, then trained on
    static      a random mask from the first step on
    codes       as gradual, but 8-bit codes are trained directly, in the blocks and beside them

What could help growth: more steps between updates, so that newborn blocks have learned something when they are judged
(`-slow`: 50 steps), longer training (`-long`: 1,200 steps, 100 between updates), fewer newborn blocks (`grow-less`).

Text: Austen as bytes, as in benchmarks/scratch_models.py; figures are of Persuasion. Writes
benchmarks/results/sparsity.json; docs/sparsity.md quotes it (benchmarks/render_sparsity.py).
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

import hf_lowbit as lb
from benchmarks.record import Record, watch
from benchmarks.scratch_models import BATCH, CONTEXT, Windows, held_out, loss, train_text
from hf_lowbit.configs.blast import kept_blocks
from hf_lowbit.functional.block_masks import best_blocks
from hf_lowbit.nn.sparsify import clear_module, sparse_modules
from hf_lowbit.sparsity.schedule import Schedule


# both widths are multiples of 20 blocks: each of these sparsities is met exactly in every row of blocks
SIZE = {"hidden_size": 160, "intermediate_size": 480, "num_hidden_layers": 4, "num_attention_heads": 5}
BLOCK, STEPS, STEP_SIZE, RATE = 8, 400, 20, 3e-3
SEEDS = (0, 1, 2)
# options of the callback; what `-slow` and `-long` change is the number of steps between updates and in all
METHODS = {
    "grow": {"grow": "budget", "grow_fraction": 0.3},
    "gradual": {"grow": "none"},
    "codes": {"grow": "none"},
    "union": {"grow": "union"},
    "grow-less": {"grow": "budget", "grow_fraction": 0.1},
    "grow-slow": {"grow": "budget", "grow_fraction": 0.3, "step_size": 50},
    "gradual-slow": {"grow": "none", "step_size": 50},
    "grow-long": {"grow": "budget", "grow_fraction": 0.3, "step_size": 100},
    "gradual-long": {"grow": "none", "step_size": 100},
}
LONG = 1200
# the grid in the order in which it is measured, a seed after the other
CELLS = (("dense", 0.0), ("grow", 0.9), ("gradual", 0.9), ("static", 0.9), ("one-shot", 0.9),
         ("grow", 0.7), ("gradual", 0.7), ("static", 0.7), ("one-shot", 0.7))  # fmt: skip
GROWTH = (("gradual", 0.95), ("grow", 0.95), ("gradual", 0.8), ("grow", 0.8))
LATER = (("codes", 0.9), ("gradual-slow", 0.9), ("grow-slow", 0.9), ("static", 0.95), ("one-shot", 0.95),
         ("static", 0.8), ("one-shot", 0.8))  # fmt: skip
LAST = (("dense-long", 0.0), ("gradual-long", 0.9), ("grow-long", 0.9), ("grow-less", 0.9), ("union", 0.9))
TEST = ("persuasion", 128)


@dataclass(frozen=True)
class Run:
    """One training run."""

    method: str
    sparsity: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.method}/{self.sparsity:g}/seed{self.seed}"

    @property
    def steps(self) -> int:
        return LONG if self.method.endswith("-long") else STEPS


class Never(Schedule):
    """Masks stay what they are."""

    def updates(self, step: int) -> bool:
        return False


class StaticMask(lb.BlastCallback):
    """Random masks with as many blocks in each row, from the first step on."""

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self.pruner.schedule = Never(state.max_steps)
        generator = torch.Generator().manual_seed(args.seed)
        for module in self.pruner.modules.values():
            count = kept_blocks(module.target, module.layout.grid[1])
            module.mask = best_blocks(torch.rand(module.layout.grid, generator=generator), count, "row")
            clear_module(module)
        # what is logged and saved are these masks
        self._keep_state()


def options(method: str) -> dict:
    return {"step_size": STEP_SIZE, **METHODS[method]}


def callback(method: str) -> lb.BlastCallback:
    if method == "static":
        return StaticMask()
    if method == "one-shot":
        # the only update is the last one
        return lb.BlastCallback(step_size=STEPS, decay=STEPS - STEPS // 2, grow="none")
    return lb.BlastCallback(**options(method))


def train(run: Run, data, steps: int | None = None):
    """The trained model and the Trainer's logs."""
    steps = steps or run.steps
    torch.manual_seed(run.seed)
    config = LlamaConfig(**SIZE, vocab_size=256, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
                         pad_token_id=None, bos_token_id=None, eos_token_id=None)  # fmt: skip
    model, callbacks = LlamaForCausalLM(config), []
    if not run.method.startswith("dense"):
        direct = {"bits": 8, "rest": lb.DQTConfig(8)} if run.method == "codes" else {}
        model = lb.quantize(model, lb.BlastConfig(sparsity=run.sparsity, block_size=BLOCK, **direct))
        callbacks = [callback(run.method), *([lb.DQTCallback()] if direct else [])]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=RATE,
            lr_scheduler_type="cosine", warmup_steps=steps // 10, max_grad_norm=1.0, use_cpu=True, seed=run.seed,
            save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=max(1, steps // 20),
            log_level="error", optim="adamw_torch", weight_decay=0.0,
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=Windows(data, steps * BATCH, run.seed),
                          callbacks=callbacks)  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model, [entry for entry in trainer.state.log_history if "loss" in entry]


def measured_sparsity(model) -> float:
    """Share of dead blocks among the layers that were to be pruned; 0 for a dense model."""
    layouts = [module.layout for _, module in sparse_modules(model)]
    return 1 - sum(layout.live_blocks for layout in layouts) / max(1, sum(layout.blocks for layout in layouts)) \
        if layouts else 0.0  # fmt: skip


def measure(run: Run, data, test, steps: int | None = None) -> dict:
    with watch() as spent:
        model, logs = train(run, data, steps)
        figures = {"test": statistics.fmean(loss(model, test)), "sparsity": measured_sparsity(model)}
    figures["train"] = [round(entry["loss"], 4) for entry in logs]
    if "blast/sparsity" in logs[-1]:
        figures["sparsity_while_training"] = [round(entry["blast/sparsity"], 4) for entry in logs]
    if run.method in METHODS:
        figures["options"] = options(run.method)
    figures["steps"] = run.steps
    figures["seconds"] = round(spent.seconds, 1)
    return figures


def summary(rows: dict) -> str:
    """Mean loss of each cell that has a run, its distance to dense, and its spread over seeds."""
    lines = [f"{'method':14}{'sparsity':>9}{'seeds':>7}{'nats/byte':>11}{'to dense':>10}{'spread':>8}"]
    for method, sparsity in (*CELLS, *GROWTH, *LATER, *LAST):
        seeds = [seed for seed in SEEDS if Run(method, sparsity, seed).key in rows]
        if not seeds:
            continue
        tests = [rows[Run(method, sparsity, seed).key]["test"] for seed in seeds]
        dense = "dense-long" if method.endswith("-long") else "dense"
        gaps = [test - rows[Run(dense, 0.0, seed).key]["test"] for test, seed in zip(tests, seeds, strict=True)
                if Run(dense, 0.0, seed).key in rows]  # fmt: skip
        gap = f"{statistics.fmean(gaps):+.3f}" if gaps else ""
        lines.append(f"{method:14}{sparsity:>9.0%}{len(seeds):>7}{statistics.fmean(tests):>11.3f}{gap:>10}"
                     f"{max(tests) - min(tests):>8.3f}")  # fmt: skip
    return "\n".join(lines)


def main(arguments) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {
        "size": SIZE, "block": BLOCK, "steps": STEPS, "step_size": STEP_SIZE, "decay": 0.25, "grow_fraction": 0.3,
        "rate": RATE, "context": CONTEXT, "batch": BATCH, "train": "emma, sensesensibility, as bytes", "test": TEST,
        "optimizer": "AdamW (0.9, 0.999), no decay", "schedule": "cosine, a tenth warmup, clipping 1",
        "targets": "mlp, row-balanced", "dtype": "float32", "seeds": SEEDS,
    }  # fmt: skip
    record = Record("sparsity", protocol, arguments.restart, timed=False)
    runs = [
        Run(*cell, seed)
        for cells in (CELLS, GROWTH[:2], GROWTH[2:], (*LATER, *LAST))
        for seed in SEEDS
        for cell in cells
    ]
    left = sum(run.key not in record.rows for run in runs)
    print(f"{len(runs)} runs, {len(runs) - left} done; a run takes one to two minutes, long ones three times that.")
    deadline = time.monotonic() + 60 * arguments.minutes
    data, test = train_text(), held_out(*TEST)
    for run in tqdm(runs):
        if run.key in record.rows:
            continue
        if time.monotonic() > deadline:
            print("time is up; run this again to continue.")
            break
        record.add(run.key, measure(run, data, test))
    print(summary(record.rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--minutes", type=float, default=20)
    main(parser.parse_args())
