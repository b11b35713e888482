"""The tables of docs/sparsity.md: quality and speed from benchmarks/results/{sparsity,blocks}.json, and bounds from
arithmetic alone.

python -m benchmarks.render_sparsity
"""

import json
import statistics
from pathlib import Path

from benchmarks.record import RESULTS, ROOT
from benchmarks.render import conditions, replace_between, table


WORDS = {
    "dense": "dense",
    "grow": "prune and grow (the default)",
    "gradual": "gradual pruning, no growth",
    "union": "gradual, union growth",
    "one-shot": "one-shot at half, then trained on",
    "static": "static random mask",
}


# hidden, intermediate, layers, vocabulary, width of all queries, of all keys, whether the output layer is tied
ARCHITECTURES = {
    "SmolLM2-135M": (576, 1536, 30, 49152, 576, 192, True),
    "Llama-3.2-1B": (2048, 8192, 16, 128256, 2048, 512, True),
    "Qwen3-1.7B": (2048, 6144, 28, 151936, 2048, 1024, True),
    "Llama-3.1-8B": (4096, 14336, 32, 128256, 4096, 1024, False),
    "Llama-3.1-70B": (8192, 28672, 80, 128256, 8192, 1024, False),
    "Llama-3.1-405B": (16384, 53248, 126, 128256, 16384, 1024, False),
}
SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95)
BLOCK = 32


def sizes(hidden, intermediate, layers, vocabulary, queries, keys, tied) -> tuple[int, int]:
    """Parameters of the MLPs, and of everything (norms included)."""
    mlp = 3 * hidden * intermediate * layers
    attention = layers * (2 * hidden * queries + 2 * hidden * keys)
    norms = hidden * (2 * layers + 1)
    return mlp, mlp + attention + norms + vocabulary * hidden * (1 if tied else 2)


def ceiling(mlp: int, total: int, sparsity: float, bits: int = 16) -> float:
    """Dense 16-bit bytes over sparse ones: an int32 for each block, and below 16 bits a 16-bit scale for its rows."""
    live = mlp * (1 - sparsity)
    extra = 4 / BLOCK**2 + (0 if bits == 16 else 2 / BLOCK)
    return 2 * total / (live * (bits / 8 + extra) + (total - mlp) * bits / 8)


def ceilings_table() -> str:
    """How many times smaller the weights can be."""
    lines = []
    for name, architecture in ARCHITECTURES.items():
        mlp, total = sizes(*architecture)
        bounds = [f"{ceiling(mlp, total, sparsity):.2f}" for sparsity in SPARSITIES]
        lines.append([name, f"{mlp / total:.1%}", *bounds, f"{ceiling(mlp, total, 0.95, 8):.2f}"])
    header = ["model", "MLPs", *(f"{sparsity:.0%}" for sparsity in SPARSITIES), "95%, all in 8 bits"]
    return table(header, lines)


def cells(rows: dict) -> dict[tuple[float, str], dict[int, float]]:
    """(sparsity, method) -> {seed: held-out loss}."""
    found: dict[tuple[float, str], dict[int, float]] = {}
    for key, row in rows.items():
        method, sparsity, seed = key.split("/")
        found.setdefault((float(sparsity), method), {})[int(seed.removeprefix("seed"))] = row["test"]
    return found


def quality_table(content: dict) -> str:
    """Held-out loss of each way at each sparsity, and its distances seed by seed: seeds share data and order."""
    found = cells(content["rows"])
    dense = found.get((0.0, "dense"), {})
    lines = []
    for sparsity, method in sorted(found, key=lambda cell: (cell[0], list(WORDS).index(cell[1]))):
        tests = found[sparsity, method]
        grown = found.get((sparsity, "grow"), {})

        def gap(to, tests=tests):
            both = [tests[seed] - to[seed] for seed in tests if seed in to]
            return f"{statistics.fmean(both):+.3f}" if both else ""

        lines.append([
            f"{sparsity:.0%}", WORDS[method], str(len(tests)), f"{statistics.fmean(tests.values()):.3f}",
            "" if method == "dense" else gap(dense), "" if method in ("dense", "grow") else gap(grown),
            f"{max(tests.values()) - min(tests.values()):.3f}" if len(tests) > 1 else "",
        ])  # fmt: skip
    header = ["sparsity of the MLPs", "way", "seeds", "nats a byte", "to dense", "to prune and grow", "spread"]
    return table(header, lines)


def forward_table(rows: dict) -> str:
    """How many times faster than dense one product is, lowest and highest of the shapes."""
    found: dict[tuple[str, str, str], dict[str, list[dict]]] = {}
    for key, row in rows.items():
        kind, *names = key.split()
        if kind == "forward":
            dtype, _, sparsity, block, m = names
            found.setdefault((dtype, sparsity, block.removeprefix("b")), {}).setdefault(m, []).append(row)
    counts = sorted({m for by_rows in found.values() for m in by_rows}, key=lambda m: int(m[2:]))
    lines = []
    for (dtype, sparsity, block), by_rows in found.items():
        limits = [row["limit"] for row in next(iter(by_rows.values()))]
        cells = [span([row["products"]["blocks"]["ratio"] for row in by_rows.get(m, [])]) for m in counts]
        lines.append([f"{dtype}, {sparsity}", f"{block} x {block}", *cells, span(limits)])
    return table(["weights, sparsity", "blocks", *counts, "dense / live weights"], lines)


def training_table(rows: dict) -> str:
    """How many times faster than dense a step of a SwiGLU MLP is: forward, and the gradients of x and the weights."""
    lines = []
    for key, row in rows.items():
        kind, dtype, shape, sparsity, block, m = key.split()
        if kind == "training":
            ratios = [f"{row['products'][name]['ratio']:.2f}" for name in ("blocks", "torch")]
            lines.append([f"{dtype}, {sparsity}", block.removeprefix("b"), f"{shape}, {m}", *ratios])
    return table(["weights, sparsity", "blocks", "MLP", "C library", "torch alone"], lines)


def span(values: list[float]) -> str:
    low, high = (f"{value:.1f}" for value in (min(values), max(values))) if values else ("", "")
    return low if low == high else f"{low} - {high}"


def write(folder: Path = RESULTS, docs: Path = ROOT / "docs") -> None:
    """Bring docs/sparsity.md up to date with what has been measured."""
    path = docs / "sparsity.md"
    content = json.loads((folder / "sparsity.json").read_text())
    text = f"{quality_table(content)}\n\n{conditions(content)}"
    page = replace_between(path.read_text(), "ceilings", ceilings_table())
    page = replace_between(page, "sparsity quality", text)
    content = json.loads((folder / "blocks.json").read_text())
    text = f"{forward_table(content['rows'])}\n\n{training_table(content['rows'])}\n\n{conditions(content)}"
    path.write_text(replace_between(page, "sparsity speed", text))
    print(f"tables: {path}")


if __name__ == "__main__":
    write()
