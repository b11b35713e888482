"""Tables and charts of what block sparsity costs in quality, from what sparsity.py and finetune_sparse.py measured."""

import statistics

from benchmarks.plot import Series, chart
from benchmarks.render import table


WORDS = {
    "dense": "dense",
    "gradual": "gradual pruning, no growth (the default)",
    "codes": "gradual pruning, 8-bit codes trained directly",
    "grow": "prune and grow, budget",
    "union": "prune and grow, union",
    "one-shot": "one-shot at half, then trained on",
    "static": "static random mask",
}
# what was tried to make growth pay: (with growth, without)
GROWTH = {
    "20 steps between updates": ("grow", "gradual"),
    "20 steps, a tenth grown instead of 0.3": ("grow-less", "gradual"),
    "20 steps, union": ("union", "gradual"),
    "50 steps between updates": ("grow-slow", "gradual-slow"),
    "1,200 steps of training, 100 between updates": ("grow-long", "gradual-long"),
}
FINETUNED = {
    "before": "before finetuning",
    "dense": "finetuned, dense",
    "gradual": "gradual pruning (the default)",
    "act": "gradual pruning, activation-weighted score",
    "one-shot": "one-shot in the first step, then finetuned",
}


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
    named = [cell for cell in found if cell[1] in WORDS]
    for sparsity, method in sorted(named, key=lambda cell: (cell[0], list(WORDS).index(cell[1]))):
        tests = found[sparsity, method]
        default = found.get((sparsity, "gradual"), {})
        lines.append([
            f"{sparsity:.0%}", WORDS[method], str(len(tests)), f"{statistics.fmean(tests.values()):.3f}",
            "" if method == "dense" else gap(tests, dense),
            "" if method in ("dense", "gradual") else gap(tests, default),
            f"{max(tests.values()) - min(tests.values()):.3f}" if len(tests) > 1 else "",
        ])  # fmt: skip
    header = ["sparsity of the MLPs", "way", "seeds", "nats a byte", "to dense", "to the default", "spread"]
    return table(header, lines)


def gap(tests: dict[int, float], to: dict[int, float]) -> str:
    """Mean difference over the seeds that both have."""
    both = [tests[seed] - to[seed] for seed in tests if seed in to]
    return f"{statistics.fmean(both):+.3f}" if both else ""


def growth_table(content: dict) -> str:
    """Loss with growth minus loss without, seed by seed."""
    found, lines = cells(content["rows"]), []
    for words, (grown, pruned) in GROWTH.items():
        for sparsity in sorted({s for s, method in found if method == grown}):
            one, other = found[sparsity, grown], found.get((sparsity, pruned), {})
            gaps = [f"{one[seed] - other[seed]:+.3f}" for seed in sorted(one) if seed in other]
            if gaps:
                lines.append([words, f"{sparsity:.0%}", ", ".join(gaps), gap(one, other)])
    return table(["growth", "sparsity", "loss with growth minus without, each seed", "mean"], lines)


def quality_chart(content: dict) -> str:
    """Loss above the dense model's of the same seed against sparsity, for each way; bars reach over the seeds."""
    found = cells(content["rows"])
    dense = found.get((0.0, "dense"), {})
    series = [Series("dense", ((0.0, 0.0, 0.0, 0.0),), flat=True)]
    for method, words in list(WORDS.items())[1:]:
        points = []
        for (sparsity, name), tests in found.items():
            gaps = [tests[seed] - dense[seed] for seed in tests if seed in dense] if name == method else []
            if gaps:
                points.append((sparsity, min(gaps), statistics.fmean(gaps), max(gaps)))
        # a line of one point is none
        if len(points) > 1:
            series.append(Series(words.removesuffix(" (the default)"), tuple(points)))
    title = "A 1.4M Llama trained from nothing, MLPs in blocks of 8 x 8"
    return chart(title, "share of dead blocks", "nats a byte above dense, held out", series, "{:.0%}")


def finetune_table(content: dict) -> str:
    """Held-out loss of SmolLM2-135M after each way."""
    rows, lines = content["rows"], []
    before = rows.get("before/0")
    for key, row in sorted(
        rows.items(), key=lambda item: (item[1]["sparsity"], list(FINETUNED).index(item[0].split("/")[0]))
    ):
        method = key.split("/")[0]
        to = f"{row['test'] - before['test']:+.3f}" if before is not None and method != "before" else ""
        lines.append([f"{row['sparsity']:.0%}", FINETUNED[method], f"{row['test']:.3f}", to])
    return table(["sparsity of the MLPs", "way", "nats a token", "to before"], lines)


def finetune_chart(content: dict) -> str:
    """Loss against sparsity after finetuning."""
    series = []
    for method, words in FINETUNED.items():
        points = tuple(
            (row["sparsity"], *[row["test"]] * 3)
            for key, row in content["rows"].items()
            if key.split("/")[0] == method
        )
        series.append(Series(words.removesuffix(" (the default)"), points, flat=method in ("before", "dense")))
    return chart("SmolLM2-135M finetuned, MLPs in blocks of 32 x 32", "share of dead blocks", "nats a token, held out",
                 series, "{:.0%}")  # fmt: skip
