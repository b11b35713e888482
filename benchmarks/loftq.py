"""What an adapter that starts from the quantization error is worth before any training, on SmolLM2-135M.

For each width, in groups of 64 and rounded without data: the relative error of the weights, and the loss on
Persuasion, of the low-bit model alone and with `hf_lowbit.initialize_from_error` at each rank, on every linear layer.
Losses are paired by window.

    python -m benchmarks.loftq                    # half an hour on two cores; continues where it stopped
    python -m benchmarks.loftq --windows 0        # the weights' error only
"""

import argparse
import math
import statistics

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lowbit as lb
from benchmarks.perplexity import novel, paired, window_nlls, windows
from benchmarks.record import Record
from scripts.fetch_assets import locate


GROUP_SIZE, LENGTH = 64, 1024
WIDTHS, RANKS = ("ternary", 2, 3, 4), (8, 32)


def weight_error(falls, which: str) -> float:
    """Root mean square over the layers of |W - W'| / |W|."""
    return math.sqrt(statistics.fmean(getattr(fall, which) ** 2 for fall in falls))


def measure(source, bits, ranks, batch) -> list[dict]:
    """One row a rank."""
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = lb.LowBitConfig(bits=bits, group_size=GROUP_SIZE, activations="float")
    rows, alone = [], None
    for rank in ranks:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, quantization_config=config)
        if alone is None and len(batch):
            alone = list(window_nlls(model, batch))
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
        falls = lb.initialize_from_error(model, dense)
        row = {"bits": bits, "rank": rank, "error_before": weight_error(falls, "before"),
               "error_after": weight_error(falls, "after")}  # fmt: skip
        if len(batch):
            found = list(window_nlls(model, batch))
            change = paired(alone, found)
            row |= {"loss_before": statistics.fmean(alone), "loss_after": statistics.fmean(found),
                    "change": change.mean, "interval": [change.low, change.high]}  # fmt: skip
        rows.append(row)
    return rows


def main(arguments) -> None:
    source = locate("smollm2")
    if source is None:
        raise SystemExit("SmolLM2 is not on this machine yet; run `python scripts/fetch_assets.py smollm2`.")
    protocol = {"model": "SmolLM2-135M-Instruct, dequantised Q4_1, permuted", "group_size": GROUP_SIZE, "text":
                "Persuasion", "windows": arguments.windows, "length": LENGTH, "dtype": "float32"}  # fmt: skip
    record = Record("loftq", protocol, restart=arguments.restart, timed=False)
    batch = windows(AutoTokenizer.from_pretrained(source), novel("persuasion"), LENGTH, max(arguments.windows, 1))
    batch = batch[: arguments.windows]
    for bits in WIDTHS:
        if all(key(bits, rank) in record.rows for rank in RANKS):
            continue
        for row in measure(source, bits, RANKS, batch):
            record.add(key(bits, row["rank"]), row)
            print(row, flush=True)


def key(bits, rank) -> str:
    return f"{bits}-rank-{rank}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=17)
    parser.add_argument("--restart", action="store_true", help="begin the results file anew")
    main(parser.parse_args())
