"""From which sparsity live blocks were not slower than the dense product, out of benchmarks/results/blocks.json.

Writes hf_lowbit/functional/block_crossover.json, which `auto` reads (functional/block_crossover.py): for training steps
and for products, by the C library and by torch alone, for each dtype, block and number of rows the least measured
sparsity from which on no time was above 1.05 times the dense one, and the highest at which one was ("slower"); null where
there is none.

python -m benchmarks.crossover
"""

import json
from pathlib import Path

from benchmarks.record import RESULTS, ROOT


TABLE = ROOT / "hf_lowbit" / "functional" / "block_crossover.json"
# dense over sparse seconds that still count as no slower
LEAST = 1 / 1.05
USES = {"forward": "inference", "training": "training"}
# who multiplied -> what its figures are called in the results
PRODUCTS = {"library": "blocks", "torch": "torch"}


def measured(rows: dict) -> dict[tuple, dict[float, float]]:
    """(use, by, dtype, block, rows of x) -> {sparsity: the lowest ratio of the shapes}."""
    found: dict[tuple, dict[float, float]] = {}
    for key, row in rows.items():
        kind, dtype, _, sparsity, block, m = key.split()
        for by, name in PRODUCTS.items():
            if kind not in USES or (by == "library") > row["kernel"].startswith("cpu-"):
                continue
            cell = USES[kind], by, dtype, int(block.removeprefix("b")), int(m.removeprefix("M="))
            share, ratio = float(sparsity.rstrip("%")) / 100, row["products"][name]["ratio"]
            ratios = found.setdefault(cell, {})
            ratios[share] = min(ratio, ratios.get(share, ratio))
    return found


def derive(rows: dict) -> list[dict]:
    """The table, from the rows of a results file."""
    table = []
    for (use, by, dtype, block, m), ratios in sorted(measured(rows).items()):
        slower = max((sparsity for sparsity, ratio in ratios.items() if ratio < LEAST), default=None)
        least = min((sparsity for sparsity in ratios if slower is None or sparsity > slower), default=None)
        cell = {"use": use, "by": by, "dtype": dtype, "block": block, "rows": m}
        table.append({**cell, "sparsity": least, "slower": slower})
    return table


def write(results: Path = RESULTS, path: Path = TABLE) -> None:
    content = json.loads((results / "blocks.json").read_text())
    lines = ",\n".join(f"  {json.dumps(row)}" for row in derive(content["rows"]))
    path.write_text(f'{{"source": "benchmarks/results/blocks.json", "rows": [\n{lines}\n]}}\n')
    print(f"table: {path}")


if __name__ == "__main__":
    write()
