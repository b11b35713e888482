"""Finetuning a pretrained model with its weights as 8-bit codes, against float32 weights from the same start.

    python -m benchmarks.finetune_direct              # continues where the last run stopped, 20 minutes at most
    python -m benchmarks.finetune_direct --restart

Two tasks. "smollm2": SmolLM2-135M on Emma, loss in nats a token of windows of other novels. "minilm": MiniLM with a
new classification head; which of four novels a passage is from, train and test parts of each novel apart. Both ways
get the same batches, schedule, clipping and bfloat16 autocast; the model itself is float32. The low-bit way is DQT
with 8-bit codes and 8-bit states for the converted layers, and both have torch's AdamW for the rest. Each has the same
three learning rates, of which the best by the validation text (or passages) is shown on text that decides nothing.

Row "start": the figures before the first step; for the low-bit way those of the rounded model.

Writes benchmarks/results/finetune_direct.json; docs/training.md quotes it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

import hf_lowbit as lb
from benchmarks.perplexity import CALIBRATION, EVALUATION, novel, window_nlls
from benchmarks.record import Record, watch
from scripts.fetch_assets import locate


WAYS = {"fp32": None, "dqt-8": {"bits": 8}}
# task -> steps, sequences a batch, tokens a sequence, learning rates
TASKS = {"smollm2": (200, 2, 128, (1e-5, 3e-5, 1e-4)), "minilm": (150, 16, 48, (3e-5, 1e-4, 3e-4))}
NOVELS = (*CALIBRATION, *EVALUATION)
# of each novel, in passages: train, validation, test; apart from each other in the text
PASSAGES = (600, 60, 120)
SEED = 0


@dataclass(frozen=True)
class Run:
    """One finetuning run; `rate` None: only measured."""

    task: str
    way: str
    rate: float | None

    @property
    def key(self) -> str:
        return f"{self.task}/{self.way}/{'start' if self.rate is None else f'{self.rate:g}'}"


class Examples(Dataset):
    """Rows of tokens with their labels; None: the tokens themselves."""

    def __init__(self, ids: torch.Tensor, labels: torch.Tensor | None = None):
        self.ids, self.labels = ids, ids if labels is None else labels

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def rows_of(tokenizer, name: str, length: int) -> torch.Tensor:
    ids = torch.tensor(tokenizer(novel(name), add_special_tokens=False, verbose=False)["input_ids"])
    return ids[: len(ids) // length * length].view(-1, length)


def texts(tokenizer, context: int) -> tuple[Examples, Examples, Examples]:
    """Windows of Emma to train on, spread over it; of Northanger Abbey to choose by; of Persuasion to show."""
    train = rows_of(tokenizer, "emma", context)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(SEED))
    return (
        Examples(train[order]),
        Examples(rows_of(tokenizer, "northangerabbey", context)[:48]),
        Examples(rows_of(tokenizer, "persuasion", context)[:128]),
    )


def passages(tokenizer, length: int) -> list[Examples]:
    """Passages labelled by their novel: the first part of each to train on, then to choose by, then to show."""
    parts = [[], [], []]
    for label, name in enumerate(NOVELS):
        rows = rows_of(tokenizer, name, length - 2)
        first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
        rows = torch.nn.functional.pad(torch.nn.functional.pad(rows, (1, 0), value=first), (0, 1), value=last)
        begin = 0
        for part, count in zip(parts, PASSAGES, strict=True):
            part.append((rows[begin : begin + count], torch.full((count,), label)))
            begin += count
    return [Examples(torch.cat([r for r, _ in part]), torch.cat([y for _, y in part])) for part in parts]


def build(run: Run) -> nn.Module:
    """The pretrained model; the head of the classifier has the same numbers each time."""
    torch.manual_seed(SEED)
    fields = WAYS[run.way]
    config = {} if fields is None else {"quantization_config": lb.DQTConfig(**fields)}
    if run.task == "smollm2":
        return AutoModelForCausalLM.from_pretrained(locate("smollm2"), dtype=torch.float32, **config)
    return AutoModelForSequenceClassification.from_pretrained(
        locate("minilm"), dtype=torch.float32, num_labels=len(NOVELS), **config
    )


def score(task: str, model: nn.Module, data: Examples) -> float:
    """Nats a token, or nats a passage of the right novel."""
    model.eval()
    if task == "smollm2":
        return statistics.fmean(window_nlls(model, data.ids))
    return statistics.fmean(
        float(nn.functional.cross_entropy(logits_of(model, ids), labels))
        for ids, labels in zip(data.ids.split(40), data.labels.split(40), strict=True)
    )


@torch.inference_mode()
def logits_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits


def accuracy(model: nn.Module, data: Examples) -> float:
    """Share of passages whose novel is found."""
    batches = zip(data.ids.split(40), data.labels.split(40), strict=True)
    right = [logits_of(model, ids).argmax(1) == y for ids, y in batches]
    return float(torch.cat(right).float().mean())


def finetune(run: Run, model: nn.Module, data: Examples) -> lb.DQTCallback | None:
    """Train in place; the callback of the low-bit way."""
    steps, batch, _, _ = TASKS[run.task]
    callback = None if WAYS[run.way] is None else lb.DQTCallback(state_bits=8)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=batch, learning_rate=run.rate,
            lr_scheduler_type="cosine", warmup_steps=steps // 10, max_grad_norm=1.0, use_cpu=True, seed=SEED,
            save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=max(1, steps // 10),
            log_level="error", optim="adamw_torch", weight_decay=0.0, bf16=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[callback] if callback else [])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return callback


def measure(run: Run) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(locate(run.task))
    make = texts if run.task == "smollm2" else passages
    train, validation, test = make(tokenizer, TASKS[run.task][2])
    figures = {}
    with watch() as spent:
        model = build(run)
        if run.rate is not None:
            callback = finetune(run, model, train)
            if callback is not None:
                figures["changed_codes"] = callback.changed_codes
        figures |= {"validation": score(run.task, model, validation), "test": score(run.task, model, test)}
        if run.task == "minilm":
            figures["accuracy"] = accuracy(model, test)
    return {**figures, "seconds": round(spent.seconds, 1)}


def runs() -> list[Run]:
    """The short task first."""
    return [
        Run(task, way, rate)
        for task in ("minilm", "smollm2")
        for rate in (None, *TASKS[task][3])
        for way in WAYS
    ]  # fmt: skip


def best(rows: dict, task: str, way: str) -> tuple[float, dict] | None:
    """(learning rate, figures) of the lowest validation loss; None before all rates are measured."""
    found = {rate: rows.get(Run(task, way, rate).key) for rate in TASKS[task][3]}
    if None in found.values():
        return None
    rate = min(found, key=lambda r: found[r]["validation"])
    return rate, found[rate]


def main(arguments) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if locate("smollm2") is None or locate("minilm") is None:
        raise SystemExit("SmolLM2 or MiniLM is not on this machine: run `python scripts/fetch_assets.py`.")
    protocol = {
        "tasks": TASKS, "ways": {way: str(fields) for way, fields in WAYS.items()}, "passages": PASSAGES, "seed": SEED,
        "train": "emma; all four novels", "optimizer": "AdamW (0.9, 0.999), no decay; 8-bit states for codes",
        "schedule": "cosine, a tenth warmup, clipping 1", "dtype": "float32 under bfloat16 autocast",
    }  # fmt: skip
    record = Record("finetune_direct", protocol, arguments.restart, timed=False)
    print(f"{len(runs())} runs, of which {len(record.rows)} are done; a run takes one to five minutes on two cores.")
    deadline = time.monotonic() + 60 * arguments.minutes
    for run in runs():
        if run.key in record.rows:
            continue
        if time.monotonic() > deadline:
            print("time is up; run this again to continue.")
            break
        record.add(run.key, measure(run))
        print(run.key, record.rows[run.key], flush=True)
    for task in TASKS:
        for way in WAYS:
            found = best(record.rows, task, way)
            if found is not None:
                print(f"{task:10}{way:8} rate {found[0]:<8g} test {found[1]['test']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--minutes", type=float, default=20)
    main(parser.parse_args())
