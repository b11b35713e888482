"""The tables of docs/training.md, made from benchmarks/results/{direct_training,training_memory,update}.json.

python -m benchmarks.render_training
"""

import json
import statistics
from pathlib import Path

from benchmarks.record import RESULTS, ROOT
from benchmarks.render import conditions, replace_between, table


WORDS = {
    "fp32": "float32",
    "bitnet": "BitNet b1.58 (float master)",
    "dqt-8": "8 bits",
    "dqt-8-ternary-forward": "8 bits, ternary forward",
    "dqt-4": "4 bits",
    "dqt-ternary": "ternary",
    "dqt-ternary-learned-scale": "ternary, learned scale",
    "dqt-8-nearest": "8 bits, rounded to nearest",
    "dqt-ternary-nearest": "ternary, rounded to nearest",
}


def best_rows(content: dict):
    """(size, steps, method, rate, rows of its seeds at the rate that was best on the validation text)."""
    protocol, rows = content["protocol"], content["rows"]
    for size, horizons in protocol["steps"].items():
        for steps in horizons:
            for method in protocol["methods"]:
                first = {
                    rate: rows.get(f"{size}/{steps}/{method}/{rate:g}/seed{protocol['seeds'][0]}")
                    for rate in protocol["rates"]
                }
                if None in first.values():
                    continue
                rate = min(first, key=lambda r: first[r]["validation"])
                keys = [f"{size}/{steps}/{method}/{rate:g}/seed{seed}" for seed in protocol["seeds"]]
                yield size, steps, method, rate, [rows[key] for key in keys if key in rows]


def quality_table(content: dict) -> str:
    """Held-out loss of every method at its best learning rate."""
    found, reference = [], {}
    for size, steps, method, rate, rows in best_rows(content):
        tests = [row["test"] for row in rows]
        mean = statistics.fmean(tests)
        if method == "fp32":
            reference[size, steps] = tests
        # seeds share data and order, so the difference is taken seed by seed
        both = list(zip(tests, reference.get((size, steps), []), strict=False))
        gap = statistics.fmean(a - b for a, b in both) if both and method != "fp32" else None
        changed = rows[0].get("changed_rate")
        found.append([
            WORDS[method], f"{rate:g}", str(len(rows)), f"{mean:.3f}",
            "" if gap is None else f"{gap:+.3f}", f"{max(tests) - min(tests):.3f}" if len(tests) > 1 else "",
            "" if changed is None else f"{100 * changed[len(changed) // 2]:.2f} %",
        ])  # fmt: skip
    header = ["weights", "best learning rate", "seeds", "nats a byte", "to float32", "spread", "codes changed a step"]
    return table(header, found)


def memory_table(content: dict) -> str:
    """Bytes a parameter of the linear layers, and MiB of the whole model."""
    found = []
    for way, row in content["rows"].items():
        parts = row["linear_bytes_per_parameter"]
        found.append([
            way, *(f"{parts[part]:.2f}" for part in ("weights", "gradients", "states")), f"{row['linear_total']:.2f}",
            f"{row['whole_total_mib']:.0f}", f"{row['peak_rss_mib']}",
        ])  # fmt: skip
    return table(
        [
            "training",
            "weights",
            "gradients",
            "states",
            "bytes a linear parameter",
            "whole model, MiB",
            "peak RSS, MiB",
        ],
        found,
    )


def update_table(content: dict) -> str:
    """Time of an update by stored bits, dtype of gradients, rule and states, over that of torch's fused AdamW; then
    whole training steps."""
    updates = {k: row["figures"] for k, row in content["rows"].items() if k.startswith("update/")}
    names = [name for name in next(iter(updates.values())) if name != "fused AdamW"]
    found = []
    for key, figures in updates.items():
        _, bits, gradients = key.split("/")
        found.append([bits, gradients, *(f"{figures[name]['ratio']:.2f}" for name in names)])
    steps = [
        [key.partition("/")[2], "SmolLM2-135M", f"{figure['ratio']:.2f}"]
        for key, row in content["rows"].items() if key.startswith("step/")
        for name, figure in row["figures"].items() if name != "fp32 AdamW"
    ]  # fmt: skip
    whole = table(["training step, 4 x 128 tokens, bfloat16 autocast", "model", "time, fp32 AdamW = 1"], steps)
    return f"{table(['stored bits', 'gradients', *names], found)}\n\n{whole}"


def write(folder: Path = RESULTS, docs: Path = ROOT / "docs") -> None:
    """Bring docs/training.md up to date with what has been measured."""
    path = docs / "training.md"
    page = path.read_text()
    for name, file, make in (
        ("quality", "direct_training", quality_table),
        ("memory", "training_memory", memory_table),
        ("update", "update", update_table),
    ):
        content = json.loads((folder / f"{file}.json").read_text())
        page = replace_between(page, name, f"{make(content)}\n\n{conditions(content)}")
    path.write_text(page)
    print(f"tables: {path}")


if __name__ == "__main__":
    write()
