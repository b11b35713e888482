"""Samples to a target by batch size and optimizer, for float weights and direct updates: text.

    python -m benchmarks.large_batch              # continues where the last run stopped, 20 minutes at most
    python -m benchmarks.large_batch --restart

A Llama of 0.1M parameters over bytes reads windows of 32 bytes of Austen until its loss on Northanger Abbey is at most
TARGET. `benchmarks/batch_sweep.py` says how the learning rate of each cell is found and what is counted.

Samples do not depend on how busy the machine is, so that rows may be measured at any time, and on other machines.
Writes benchmarks/results/large_batch.json; docs/measurement.md quotes it.
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from benchmarks import batch_sweep
from benchmarks.batch_sweep import FACTOR, MICRO, OPTIMIZERS, WARMUP, WAYS, Task, cells, summary, sweep
from benchmarks.record import Record
from benchmarks.scratch_models import as_bytes, train_text


CONTEXT, TARGET = 32, 2.6
SIZE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
VALIDATION = ("northangerabbey", 128)
BATCHES, SEEDS = (16, 64, 256, 1024), (0, 1, 2)


def build(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZE, vocab_size=256, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
                         pad_token_id=None, bos_token_id=None, eos_token_id=None)  # fmt: skip
    return LlamaForCausalLM(config)


def task() -> Task:
    data = train_text()
    held_out = as_bytes([VALIDATION[0]])[: VALIDATION[1] * CONTEXT].view(-1, CONTEXT).long()

    def batches(seed: int, batch: int):
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(data) - CONTEXT, (batch, 1), generator=generator)
            ids = data[starts + torch.arange(CONTEXT)].long()
            yield {"input_ids": ids, "labels": ids}

    @torch.inference_mode()
    def quality(model) -> float:
        model.eval()
        return float(model(input_ids=held_out, labels=held_out).loss)

    # 64 steps at the largest batch
    return Task(build, batches, quality, TARGET, lambda batch: max(32_768, 64 * batch), lambda b: max(1, 256 // b))


def main(arguments) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {
        "size": SIZE, "context": CONTEXT, "target": TARGET, "validation": VALIDATION, "batches": BATCHES,
        "seeds": SEEDS, "ways": WAYS, "optimizers": {name: first for name, (_, first) in OPTIMIZERS.items()},
        "warmup": WARMUP, "factor": FACTOR, "most_rates": batch_sweep.MOST_RATES, "micro_batch": MICRO,
        "budget": "the larger of 32768 samples and 64 steps", "every": "256 samples, or a step",
        "train": "emma, sensesensibility, as bytes", "autocast": "bfloat16",
    }  # fmt: skip
    record = Record("large_batch", protocol, arguments.restart, timed=False)
    plan = cells(WAYS, OPTIMIZERS, BATCHES)
    print(f"{len(plan)} cells of about 6 runs, 5 to 60 seconds each; {len(record.rows)} runs are done.")
    sweep(record, task(), plan, SEEDS, time.monotonic() + 60 * arguments.minutes)
    print(summary(record.rows, plan, SEEDS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--minutes", type=float, default=20)
    main(parser.parse_args())
