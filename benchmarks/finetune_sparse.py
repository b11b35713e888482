"""What a pretrained model loses when its MLPs become block-sparse by finetuning: SmolLM2-135M to 50 and 70 %.

    python -m benchmarks.finetune_sparse              # continues where the last run stopped, 30 minutes at most
    python -m benchmarks.finetune_sparse --restart    # from nothing

All ways see the same windows of Emma in the same order, the same optimizer, learning rate and number of steps, and end
at the same measured sparsity; the model is SmolLM2-135M-Instruct, whose MLPs are cut into blocks of 32 x 32,
row-balanced:

    before      the model as it is
    dense       finetuned, no block removed
    gradual     `BlastCallback`: cubic schedule, no growth, blocks scored by their norm
    act         the same, scored by their norm weighted by the mean square of their inputs
    one-shot    pruned to the target in the first step, by norm, then finetuned for all the other steps

A run is short (the steps below): figures say what a few thousand tokens recover, not where training would end.
Evaluation: nats a token on the first windows of Persuasion, which no run is trained on. Writes
benchmarks/results/finetune_sparse.json; docs/sparsity.md quotes it (benchmarks/render_sparsity.py).
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

import hf_lowbit as lb
from benchmarks.perplexity import novel, window_nlls, windows
from benchmarks.record import Record, watch
from benchmarks.sparsity import measured_sparsity
from scripts.fetch_assets import ASSETS, locate


BLOCK, STEPS, CONTEXT, BATCH, RATE = 32, 32, 128, 2, 3e-4
# masks are frozen for the last quarter
UPDATES, DECAY = 8, 0.25
EVALUATED = (128, 40)
CELLS = (("before", 0.0), ("gradual", 0.5), ("one-shot", 0.5), ("gradual", 0.7), ("one-shot", 0.7), ("act", 0.5),
         ("act", 0.7), ("dense", 0.0))  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One way to one sparsity."""

    method: str
    sparsity: float

    @property
    def key(self) -> str:
        return f"{self.method}/{self.sparsity:g}"


class Rows(Dataset):
    """Windows of Emma, spread over the whole of it."""

    def __init__(self, tokenizer, count: int):
        ids = torch.tensor(tokenizer(novel("emma"), add_special_tokens=False, verbose=False)["input_ids"])
        rows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        self.rows = rows[:: max(1, len(rows) // count)][:count]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def callback(method: str, steps: int) -> lb.BlastCallback:
    if method == "one-shot":
        # the only update is the last one, after the first step
        return lb.BlastCallback(step_size=steps, decay=steps - 1, grow="none")
    score = "act" if method == "act" else "fro"
    return lb.BlastCallback(
        step_size=max(1, round(steps * (1 - DECAY) / UPDATES)), decay=DECAY, grow="none", score=score
    )


def train(run: Run, folder, steps: int = STEPS):
    """The model after `run`, and the Trainer's logs."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = None if run.sparsity == 0 else lb.BlastConfig(sparsity=run.sparsity, block_size=BLOCK)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    if run.method == "before":
        return model, tokenizer, []
    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(
            output_dir=output, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=RATE,
            lr_scheduler_type="cosine", warmup_steps=max(1, steps // 10), max_grad_norm=1.0, use_cpu=True, seed=0,
            save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=max(1, steps // 10),
            log_level="error", optim="adamw_torch", weight_decay=0.0,
        )  # fmt: skip
        callbacks = [] if run.sparsity == 0 else [callback(run.method, steps)]
        trainer = Trainer(model=model, args=args, train_dataset=Rows(tokenizer, steps * BATCH), callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model, tokenizer, [entry for entry in trainer.state.log_history if "loss" in entry]


def measure(run: Run, folder) -> dict:
    with watch() as spent:
        model, tokenizer, logs = train(run, folder)
        nlls = list(window_nlls(model, windows(tokenizer, novel("persuasion"), *EVALUATED)))
    return {
        "test": statistics.fmean(nlls), "sparsity": measured_sparsity(model),
        "train": [round(entry["loss"], 4) for entry in logs], "seconds": round(spent.seconds, 1),
    }  # fmt: skip


def main(arguments) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = locate("smollm2")
    if folder is None:
        raise SystemExit("smollm2 is not on this machine; run `python scripts/fetch_assets.py`.")
    protocol = {
        "model": "SmolLM2-135M-Instruct", "baseline": ASSETS["smollm2"].baseline, "train": "emma",
        "text": "persuasion", "block": BLOCK, "steps": STEPS, "context": CONTEXT, "batch": BATCH, "rate": RATE,
        "updates": UPDATES, "decay": DECAY, "evaluated": EVALUATED, "optimizer": "AdamW (0.9, 0.999), no decay",
        "schedule": "cosine, a tenth warmup, clipping 1", "targets": "mlp, row-balanced", "dtype": "float32",
        "seed": 0,
    }  # fmt: skip
    record = Record("finetune_sparse", protocol, arguments.restart, timed=False)
    runs = [Run(*cell) for cell in CELLS]
    print(f"{len(runs)} runs, {sum(run.key in record.rows for run in runs)} done; a run takes some minutes.")
    deadline = time.monotonic() + 60 * arguments.minutes
    for run in tqdm(runs):
        if run.key in record.rows:
            continue
        if time.monotonic() > deadline:
            print("time is up; run this again to continue.")
            break
        record.add(run.key, measure(run, folder))
    for key, row in record.rows.items():
        print(f"{key:16}{row['test']:8.3f} nats a token, {row['sparsity']:.1%} of blocks dead")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--minutes", type=float, default=30)
    main(parser.parse_args())
