"""Whether moving weights toward the dense model's outputs before GPTQ helps, and how much of it: SmolLM2-135M.

    python -m benchmarks.propagation [--restart] [--minutes 20] [--bits 3 4]

Each row is a layer stage (GPTQ, groups of 64, the same calibration rows of Emma) with another share of the correction
and another damping (`hf_lowbit/compression/propagation.py`); "none" is without it, "chosen" takes the share that holds
on the other half of the batches. `selection` is the loss in nats on Sense and Sensibility, by which settings are
compared. Then "none" and the best setting of each width are measured by `perplexity` (benchmarks/perplexity.py) of
Persuasion, on which nothing is chosen.

Writes benchmarks/results/propagation.json.
"""

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks import perplexity
from benchmarks.record import Record
from benchmarks.refine import measure
from hf_lowbit.compression.layer_stage import quantize_layers
from hf_lowbit.compression.propagation import Propagation
from hf_lowbit.configs.lowbit import LowBitConfig
from hf_lowbit.nn.targets import find_targets
from scripts.fetch_assets import ASSETS, locate


BITS = (3, 4)
GROUP, TOKENS, ROWS = 64, 512, 16
# windows of the text that the share is selected on
SELECTION = 6
# share of the correction (None: chosen on the other half), and damping of H
SETTINGS = {
    "none": None,
    "chosen, damping 0.1": Propagation(None, 0.1),
    "half, damping 0.1": Propagation(0.5, 0.1),
    "half, damping 0.01": Propagation(0.5, 0.01),
    "whole, damping 0.01": Propagation(1.0, 0.01),
}


def rounded(load, bits: int, name: str, batches: list):
    model = load()
    quantize_layers(model, find_targets(model, LowBitConfig(bits=bits, group_size=GROUP)), batches, SETTINGS[name])
    return model


def loss(model, text) -> float:
    return round(statistics.fmean(perplexity.window_nlls(model, text)), 4)


def best_of(rows: dict, bits: int) -> str:
    """The setting with the least loss on the text that settings are selected on; "none" is no candidate."""
    found = {name: rows[f"{bits}/{name}"]["selection"] for name in SETTINGS if f"{bits}/{name}" in rows}
    return min((name for name in found if name != "none"), key=found.get)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true", help="throw the measured rows away")
    parser.add_argument("--minutes", type=float, default=20, help="begin no row after this time")
    parser.add_argument("--bits", type=int, nargs="+", choices=BITS, default=BITS, help="which widths")
    arguments = parser.parse_args()
    folder = locate("smollm2")
    if folder is None:
        raise SystemExit("smollm2 is not on this machine; run `python scripts/fetch_assets.py`.")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {
        "baseline": ASSETS["smollm2"].baseline, "calibration": "emma", "selection": "sensesensibility",
        "text": "persuasion", "windows": perplexity.COUNT, "length": perplexity.LENGTH, "dtype": "bfloat16",
        "group_size": GROUP, "rows": ROWS, "tokens": TOKENS, "selection_windows": SELECTION,
    }  # fmt: skip
    record = Record("propagation", protocol, restart=arguments.restart, timed=False)
    deadline = time.monotonic() + 60 * arguments.minutes
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = perplexity.windows(tokenizer, perplexity.novel("persuasion"))
    selection = perplexity.windows(tokenizer, perplexity.novel("sensesensibility"), count=SELECTION)
    rows = perplexity.windows(tokenizer, perplexity.novel("emma"), TOKENS, ROWS)
    batches = [{"input_ids": row[None]} for row in rows]

    def load():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def show(key: str) -> None:
        print(key, {k: v for k, v in record.rows[key].items() if k != "nlls"}, flush=True)

    work = [(f"{bits}/{name}", bits, name) for bits in arguments.bits for name in SETTINGS]
    missing = [entry for entry in work if entry[0] not in record.rows]
    print(f"{len(missing)} of {len(work)} rows are missing, 1 to 3 minutes each")
    for key, bits, name in missing:
        if time.monotonic() > deadline:
            return
        record.add(key, {"selection": loss(rounded(load, bits, name, batches), selection)})
        show(key)
    if "dense" not in record.rows:
        record.add("dense", {"selection": loss(load(), selection), **measure(load(), text, None)})
    for bits in arguments.bits:
        for name in ("none", best_of(record.rows, bits)):
            row = record.rows[f"{bits}/{name}"]
            if "perplexity" not in row and time.monotonic() < deadline:
                figures = measure(rounded(load, bits, name, batches), text, record.rows["dense"])
                record.add(f"{bits}/{name}", {"selection": row["selection"], **figures})
                show(f"{bits}/{name}")


if __name__ == "__main__":
    main()
