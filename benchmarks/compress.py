"""What calibration, planning and refinement are worth: perplexity of SmolLM2-135M after `lb.compress`.

    python -m benchmarks.compress [--restart] [--minutes 20] [--only 3/planned 2/stages]

Rows, groups of 64 and the layer stage alone where nothing else is said:

    N/rtn       uniform bits, rounded without data
    N/gptq      uniform bits, GPTQ on calibration text
    N/planned   a plan whose average over the same weights is that of N/gptq
    N/budget    a plan whose bytes, embedding and output layer among what is planned, are those of N/gptq
    N/stages    uniform bits, all three stages with their defaults
    shipped/... the same of the checkpoint as it was published, whose weights lie on a grid of 4 bits: the figures that
                others report for this model are of that one

Calibration text is Emma, perplexity (benchmarks/perplexity.py) is of Persuasion, which nothing is chosen on. `ratio`
is the perplexity over that of the dense model; `won` the share of the increase over the dense model, in perplexity,
that a row took back from N/gptq; `cpu_seconds` the processor time of this process, which depends less than `seconds`
on what else the machine does.

Writes benchmarks/results/compress.json.
"""

import argparse
import time
from collections import Counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hf_lowbit as lb
from benchmarks import perplexity
from benchmarks.record import Record, watch
from benchmarks.refine import measure, won
from hf_lowbit.pipeline.run import ROWS
from scripts.fetch_assets import ASSETS, locate


BITS = (4, 3, 2)
PLANNED = (3, 2, 4)
SHIPPED = (4, 3)
TOKENS = 512
MODELS = {"": "smollm2", "shipped/": "smollm2-shipped"}


def work() -> list[tuple[str, str, int, str]]:
    """(key, prefix of the model, bits, method) of every row, in the order in which they are measured."""
    found = [("", bits, method) for bits in BITS for method in ("rtn", "gptq")]
    found += [("", bits, method) for bits in PLANNED for method in ("planned", "budget")]
    found += [("", bits, "stages") for bits in reversed(BITS)]
    found += [("shipped/", bits, method) for bits in SHIPPED for method in ("rtn", "gptq")]
    return [(f"{prefix}{bits}/{method}", prefix, bits, method) for prefix, bits, method in found]


def compress(dense, bits: int, method: str, calibration, uniform: dict | None):
    """The result of `lb.compress` for one row; `uniform` is the row whose size a plan must not exceed."""
    data = None if method == "rtn" else calibration
    size = {"bits": bits}
    if method == "planned":
        size = {"bits": float(uniform["average"])}
    elif method == "budget":
        size = {"budget": uniform["bytes"]}
    stages = ("layer", "block", "global") if method == "stages" else ("layer",)
    return lb.compress(dense, calibration=data, stages=stages, **size)


def measure_row(dense, base: dict, bits: int, method: str, calibration, text, uniform: dict | None) -> dict:
    begin = time.process_time()
    with watch() as spent:
        result = compress(dense, bits, method, calibration, uniform)
    cpu = time.process_time() - begin
    # bits a weight of what is low-bit, scales included
    size = {"bytes": result.report.total_bytes, "average": result.report.bits_per_weight}
    row = {**measure(result.model, text, base), **size}
    row |= {"seconds": round(spent.seconds, 1), "cpu_seconds": round(cpu, 1)}
    row["ratio"] = round(row["perplexity"] / base["perplexity"], 4)
    if uniform is not None:
        row["won"] = won(uniform, row, base)
    if method in ("planned", "budget"):
        counts = Counter(str(scheme.bits) for scheme in result.plan.modules.values())
        row["modules"] = dict(sorted(counts.items()))
    return row


def main() -> None:
    rows = work()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true", help="throw the measured rows away")
    parser.add_argument("--minutes", type=float, default=20, help="begin no row after this time")
    parser.add_argument("--only", nargs="+", choices=[key for key, *_ in rows], help="some of the rows")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {
        "baseline": ASSETS["smollm2"].baseline, "calibration": "emma", "text": "persuasion",
        "windows": perplexity.COUNT, "length": perplexity.LENGTH, "dtype": "bfloat16", "group_size": 64,
        "rows": ROWS, "tokens": TOKENS, "seed": 0,
    }  # fmt: skip
    record = Record("compress", protocol, restart=arguments.restart, timed=False)
    deadline = time.monotonic() + 60 * arguments.minutes
    missing = [row for row in rows if row[0] not in record.rows and row[0] in (arguments.only or [row[0]])]
    print(f"{len(missing)} rows are missing, 1 to 2 minutes each, those with all stages 10")
    for prefix in dict.fromkeys(row[1] for row in missing):
        folder = locate(MODELS[prefix])
        if folder is None:
            raise SystemExit("smollm2 is not on this machine; run `python scripts/fetch_assets.py`.")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = perplexity.windows(tokenizer, perplexity.novel("persuasion"))
        calibration = perplexity.windows(tokenizer, perplexity.novel("emma"), TOKENS, ROWS)
        dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        if f"{prefix}dense" not in record.rows:
            record.add(f"{prefix}dense", measure(dense, text, None))
        base = record.rows[f"{prefix}dense"]
        for key, own, bits, method in missing:
            if own != prefix or time.monotonic() > deadline:
                continue
            uniform = record.rows.get(f"{prefix}{bits}/gptq") if method not in ("rtn", "gptq") else None
            if uniform is None and method in ("planned", "budget"):
                print(f"{key} waits for {prefix}{bits}/gptq")
                continue
            row = measure_row(dense, base, bits, method, calibration, text, uniform)
            record.add(key, row)
            print(key, {k: v for k, v in row.items() if k != "nlls"}, flush=True)


if __name__ == "__main__":
    main()
