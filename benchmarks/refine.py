"""What the block and the global stage win back: perplexity of SmolLM2-135M after each of them.

    python -m benchmarks.refine                 # continues where the last run stopped, 20 minutes at most
    python -m benchmarks.refine --bits 4 3      # some of the widths
    python -m benchmarks.refine --restart       # from nothing

The start is hf_lowbit's own rounding without data, groups of 64. Both stages tune on Emma and choose what they keep on
another part of the calibration text, Sense and Sensibility; perplexity (benchmarks/perplexity.py) is of Persuasion,
which nothing is chosen on. Products run through whichever kernel the machine has.

`won` is the share of the increase over the dense model, in perplexity, that the stages took back.

Writes benchmarks/results/refine.json.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hf_lowbit as lb
from benchmarks import perplexity
from benchmarks.record import Record, watch
from hf_lowbit.compression.refine.blocks import refine_blocks
from hf_lowbit.compression.refine.whole import refine_globally
from scripts.fetch_assets import ASSETS, locate


BITS = (4, 3, 2)
GROUP = 64
# at this width the two kinds of targets of the block stage are compared
COMPARED = 3
# calibration: batches of ROWS windows of TOKENS tokens
TOKENS, ROWS, TRAINING, HELD_OUT = 512, 2, 8, 2
BLOCK_STEPS, GLOBAL_STEPS = 16, 24


def batches(tokenizer, name: str, count: int) -> list[dict]:
    rows = perplexity.windows(tokenizer, perplexity.novel(name), TOKENS, count * ROWS)
    return [{"input_ids": part} for part in rows.split(ROWS)]


def measure(model, text, dense: dict | None) -> dict:
    nlls = list(perplexity.window_nlls(model, text))
    figures = {"perplexity": perplexity.perplexity(nlls), "nlls": nlls}
    if dense:
        difference = perplexity.paired(dense["nlls"], nlls)
        figures["nll_difference"] = [difference.mean, difference.low, difference.high]
    return figures


def won(start: dict, now: dict, dense: dict) -> float:
    increase = start["perplexity"] - dense["perplexity"]
    return round((start["perplexity"] - now["perplexity"]) / increase, 3)


def measure_stages(bits: int, load, dense, record: Record, tuning: list, held_out: list, text) -> None:
    """The rows of one width; written together, since a stage begins with the model that the one before it left."""
    base, rows = record.rows["dense"], {}
    with watch() as spent:
        model = lb.quantize(load(), lb.LowBitConfig(bits=bits, group_size=GROUP, activations="float"))
    rows["rtn"] = {**measure(model, text, base), "seconds": round(spent.seconds, 1)}
    print(bits, "rtn", rows["rtn"]["perplexity"], flush=True)
    with watch() as spent:
        blocks = refine_blocks(model, dense, tuning, held_out, steps=BLOCK_STEPS)
    facts = {"seconds": round(spent.seconds, 1), "kept": sum(result.kept for result in blocks), "blocks": len(blocks)}
    rows["blocks"] = {**measure(model, text, base), **facts}
    print(bits, "blocks", rows["blocks"]["perplexity"], facts, flush=True)
    with watch() as spent:
        result = refine_globally(model, dense, tuning, held_out, steps=GLOBAL_STEPS)
    facts = {"seconds": round(spent.seconds, 1), "held_out": result.losses, "step": result.step}
    rows["global"] = {**measure(model, text, base), **facts}
    print(bits, "global", rows["global"]["perplexity"], facts, flush=True)
    for stage, row in rows.items():
        extra = {} if stage == "rtn" else {"won": won(rows["rtn"], row, base)}
        record.add(f"{bits}/g{GROUP}/{stage}", {**row, **extra})


def compare_targets(bits: int, load, dense, record: Record, tuning: list, held_out: list, text) -> None:
    """The block stage with targets made from the low-bit model's own states, beside the row "blocks"."""
    model = lb.quantize(load(), lb.LowBitConfig(bits=bits, group_size=GROUP, activations="float"))
    refine_blocks(model, dense, tuning, held_out, steps=BLOCK_STEPS, targets="quantized")
    row = measure(model, text, record.rows["dense"])
    share = won(record.rows[f"{bits}/g{GROUP}/rtn"], row, record.rows["dense"])
    record.add(f"{bits}/g{GROUP}/blocks-quantized", {**row, "won": share})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true", help="throw the measured rows away")
    parser.add_argument("--bits", type=int, nargs="+", choices=BITS, default=BITS, help="which widths")
    parser.add_argument("--minutes", type=float, default=20, help="begin no width after this time")
    arguments = parser.parse_args()
    folder = locate("smollm2")
    if folder is None:
        raise SystemExit("smollm2 is not on this machine; run `python scripts/fetch_assets.py`.")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {
        "baseline": ASSETS["smollm2"].baseline,
        "tuned_on": "emma", "held_out": "sensesensibility", "text": "persuasion",
        "windows": perplexity.COUNT, "length": perplexity.LENGTH, "dtype": "bfloat16", "group_size": GROUP,
        "calibration": {"tokens": TOKENS, "rows": ROWS, "batches": TRAINING, "held_out_batches": HELD_OUT},
        "steps": {"block": BLOCK_STEPS, "global": GLOBAL_STEPS}, "seed": 0,
    }  # fmt: skip
    record = Record("refine", protocol, restart=arguments.restart, timed=False)
    missing = [bits for bits in arguments.bits if f"{bits}/g{GROUP}/global" not in record.rows]
    print(f"{len(missing)} of {len(arguments.bits)} widths are missing, about 5 minutes each")
    deadline = time.monotonic() + 60 * arguments.minutes
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = perplexity.windows(tokenizer, perplexity.novel("persuasion"))
    tuning = batches(tokenizer, "emma", TRAINING)
    held_out = batches(tokenizer, "sensesensibility", HELD_OUT)

    def load():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    dense = load()
    if "dense" not in record.rows:
        record.add("dense", measure(dense, text, None))
    for bits in missing:
        if time.monotonic() > deadline:
            break
        measure_stages(bits, load, dense, record, tuning, held_out, text)
    compared = f"{COMPARED}/g{GROUP}"
    ready = f"{compared}/rtn" in record.rows and f"{compared}/blocks-quantized" not in record.rows
    if ready and time.monotonic() < deadline:
        compare_targets(COMPARED, load, dense, record, tuning, held_out, text)


if __name__ == "__main__":
    main()
