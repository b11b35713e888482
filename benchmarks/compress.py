"""What calibration and planning are worth: perplexity of SmolLM2-135M after the layer stage of `lb.compress`.

    python -m benchmarks.compress [--restart] [--minutes 20]

Rows: every width by rounding without data ("rtn") and by GPTQ on calibration text ("gptq"), groups of 64; and plans
("planned") of the same bytes as the uniform GPTQ rows, chosen with the same text. Calibration text is Emma, perplexity
(benchmarks/perplexity.py) is of Persuasion, which nothing is chosen on.

`won` is the share of the increase over the dense model, in perplexity, that a plan took back from the uniform row.

Writes benchmarks/results/compress.json.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hf_lowbit as lb
from benchmarks import perplexity
from benchmarks.record import Record, watch
from benchmarks.refine import measure
from hf_lowbit.pipeline.run import ROWS
from scripts.fetch_assets import ASSETS, locate


BITS = (4, 3, 2)
PLANNED = (3, 2, 4)
TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true", help="throw the measured rows away")
    parser.add_argument("--minutes", type=float, default=20, help="begin no row after this time")
    arguments = parser.parse_args()
    folder = locate("smollm2")
    if folder is None:
        raise SystemExit("smollm2 is not on this machine; run `python scripts/fetch_assets.py`.")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {
        "baseline": ASSETS["smollm2"].baseline, "calibration": "emma", "text": "persuasion",
        "windows": perplexity.COUNT, "length": perplexity.LENGTH, "dtype": "bfloat16", "group_size": 64,
        "rows": ROWS, "tokens": TOKENS, "seed": 0,
    }  # fmt: skip
    record = Record("compress", protocol, restart=arguments.restart, timed=False)
    deadline = time.monotonic() + 60 * arguments.minutes
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = perplexity.windows(tokenizer, perplexity.novel("persuasion"))
    calibration = perplexity.windows(tokenizer, perplexity.novel("emma"), TOKENS, ROWS)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    if "dense" not in record.rows:
        record.add("dense", measure(dense, text, None))
    base = record.rows["dense"]
    work = [(f"{bits}/{method}", bits, method) for bits in BITS for method in ("rtn", "gptq")]
    work += [(f"{bits}/planned", bits, "planned") for bits in PLANNED]
    print(f"{sum(key not in record.rows for key, *_ in work)} of {len(work)} rows are missing, 1 to 2 minutes each")
    for key, bits, method in work:
        if key in record.rows or time.monotonic() > deadline:
            continue
        data = None if method == "rtn" else calibration
        wanted = float(record.rows[f"{bits}/gptq"]["average"]) if method == "planned" else bits
        with watch() as spent:
            result = lb.compress(dense, bits=wanted, calibration=data, stages=("layer",))
        # bits a weight of what is low-bit, scales included
        average = result.report.bits_per_weight
        row = {**measure(result.model, text, base), "bytes": result.report.total_bytes, "average": average,
               "seconds": round(spent.seconds, 1)}  # fmt: skip
        if method == "planned":
            uniform = record.rows[f"{bits}/gptq"]["perplexity"]
            row["won"] = round((uniform - row["perplexity"]) / (uniform - base["perplexity"]), 3)
        record.add(key, row)
        print(key, {k: v for k, v in row.items() if k != "nlls"}, flush=True)


if __name__ == "__main__":
    main()
