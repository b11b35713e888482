"""The tables and charts of docs/sparsity.md: quality and speed from benchmarks/results/*.json, and bounds from
arithmetic alone, which docs/papers.md sets beside the paper's claims.

python -m benchmarks.render_sparsity
"""

import json
from pathlib import Path

from benchmarks.record import RESULTS, ROOT
from benchmarks.render import conditions, replace_between, table
from benchmarks.sparsity_tables import finetune_chart, finetune_table, growth_table, quality_chart, quality_table


# hidden, intermediate, layers, vocabulary, width of all queries, of all keys, whether the output layer is tied
ARCHITECTURES = {
    "SmolLM2-135M": (576, 1536, 30, 49152, 576, 192, True),
    "Llama-3.2-1B": (2048, 8192, 16, 128256, 2048, 512, True),
    "Qwen3-1.7B": (2048, 6144, 28, 151936, 2048, 1024, True),
    "Llama-3.1-8B": (4096, 14336, 32, 128256, 4096, 1024, False),
    "Llama-3.1-70B": (8192, 28672, 80, 128256, 8192, 1024, False),
    "Llama-3.1-405B": (16384, 53248, 126, 128256, 16384, 1024, False),
}
# what abstracts and captions say of a model, at the highest sparsity they name
CLAIMS = (
    ("memory, times smaller", "Llama-3.1-405B", 0.95, "4.45 (second version), 3.12 (first)"),
    ("inference on 16 GPUs, times faster", "Llama-3.1-405B", 0.95, "2.2"),
    ("inference on one GPU, times faster", "Llama-3.2-1B", 0.95, "1.6"),
)
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


def claims_table() -> str:
    """What the paper says of a model beside what its architecture allows: a memory or a decode rate that is bound by
    reading weights can't exceed the ceiling."""
    lines = []
    for claim, name, sparsity, value in CLAIMS:
        mlp, total = sizes(*ARCHITECTURES[name])
        lines.append([claim, f"{name}, {sparsity:.0%}", value, f"{ceiling(mlp, total, sparsity):.2f}",
                      f"{ceiling(mlp, total, sparsity, 8):.2f}"])  # fmt: skip
    return table(["claim", "model, sparsity", "the paper", "ceiling, 16 bits", "ceiling, all in 8 bits"], lines)


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


def decode_table(rows: dict) -> str:
    """Size and decode of a model of a billion parameters whose MLPs are 95 % sparse, against dense bfloat16."""
    names = [key.removeprefix("decode ") for key in rows if key.startswith("decode ")]
    found = [(name, rows[f"size {name}"], rows[f"decode {name}"]) for name in names]
    body = [
        [
            name,
            f"{size['bytes'] / 1e6:.0f} MB",
            f"{size['ratio']:.2f}",
            f"{speed['after']:.1f}",
            f"{speed['ratio']:.2f}",
        ]
        for name, size, speed in found
    ]
    return table(["candidate", "weights", "times smaller", "tokens/s", "times faster"], body)


def span(values: list[float]) -> str:
    low, high = (f"{value:.1f}" for value in (min(values), max(values))) if values else ("", "")
    return low if low == high else f"{low} - {high}"


def write(folder: Path = RESULTS, docs: Path = ROOT / "docs") -> None:
    """Bring docs/sparsity.md, its charts, and the paper's claims in docs/papers.md up to date."""
    path = docs / "sparsity.md"
    content = json.loads((folder / "sparsity.json").read_text())
    text = f"{quality_table(content)}\n\n{conditions(content)}"
    page = replace_between(path.read_text(), "ceilings", ceilings_table())
    page = replace_between(page, "sparsity quality", text)
    page = replace_between(page, "sparsity growth", growth_table(content))
    (docs / "sparsity_quality.svg").write_text(quality_chart(content))
    finetuned = folder / "finetune_sparse.json"
    if finetuned.exists():
        content = json.loads(finetuned.read_text())
        chart = "![loss against sparsity](sparsity_finetuned.svg)"
        text = f"{finetune_table(content)}\n\n{chart}\n\n{conditions(content)}"
        page = replace_between(page, "sparsity finetuning", text)
        (docs / "sparsity_finetuned.svg").write_text(finetune_chart(content))
    content = json.loads((folder / "blocks.json").read_text())
    text = f"{forward_table(content['rows'])}\n\n{training_table(content['rows'])}\n\n{conditions(content)}"
    page = replace_between(page, "sparsity speed", text)
    decoded = folder / "sparse_decode.json"
    if decoded.exists():
        content = json.loads(decoded.read_text())
        page = replace_between(page, "sparse decode", f"{decode_table(content['rows'])}\n\n{conditions(content)}")
    path.write_text(page)
    papers = docs / "papers.md"
    papers.write_text(replace_between(papers.read_text(), "sparsity claims", claims_table()))
    print(f"tables: {path}, {papers}")


if __name__ == "__main__":
    write()
