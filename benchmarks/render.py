"""Markdown tables made from benchmarks/results/*.json, written between markers of the pages in docs/.

    python -m benchmarks.render          # all of them

A marker pair is `<!-- begin NAME -->` and `<!-- end NAME -->`; what stands between them is replaced, the prose around
it is not touched. Numbers in the documentation are therefore the numbers in the results.
"""

import json
import math
import statistics
from pathlib import Path

from benchmarks.linear import WITHOUT_BFLOAT16
from benchmarks.record import RESULTS, ROOT


WIDTHS = ("8", "4", "3", "2", "ternary")
GROUPS = ("g32", "g64", "g128", "channel")


def replace_between(page: str, name: str, text: str) -> str:
    """`page` with `text` between the markers of `name`."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no markers {begin} and {end}; add them where the table belongs.")
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A markdown table; the first two columns are words, the others numbers."""
    rule = ["---", "---", *["---:"] * (len(header) - 2)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def number(value: float, digits: int = 2) -> str:
    """Fixed digits where they mean something; large values as powers of ten."""
    if math.isinf(value) or value >= 1e4:
        return "inf" if math.isinf(value) else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.{digits}f}"


def percent(interval: list[float]) -> str:
    """[mean, low, high] of a log ratio as a change with its interval; beyond tenfold only that."""
    mean, low, high = (100 * math.expm1(min(value, 50)) for value in interval)
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})" if mean < 900 else "over tenfold"


def points(interval: list[float]) -> str:
    mean, low, high = (100 * value for value in interval)
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def cells(rows: dict, model: str):
    """(width, group, rtn row, absmax row or None) of what was measured, from wide to narrow."""
    for bits in WIDTHS:
        for group in GROUPS:
            row = rows.get(f"{model}/{bits}/{group}/rtn")
            if row is not None:
                yield bits, group.removeprefix("g"), row, rows.get(f"{model}/{bits}/{group}/absmax")


def smollm2_table(rows: dict) -> str:
    header = ["bits", "group", "MB", "bits a weight", "perplexity", "change (95%)", "absmax perplexity"]
    dense = rows["smollm2/dense"]
    lines = [["bf16", "", f"{dense['bytes'] / 1e6:.1f}", "16.00", number(dense["perplexity"]), "", ""]]
    for bits, group, row, reference in cells(rows, "smollm2"):
        size, width = f"{row['bytes'] / 1e6:.1f}", f"{row['bits_per_weight']:.2f}"
        plain = number(reference["perplexity"]) if reference else ""
        lines.append([bits, group, size, width, number(row["perplexity"]), percent(row["nll_difference"]), plain])
    return table(header, lines)


def minilm_table(rows: dict) -> str:
    header = ["bits", "group", "MB", "bits a weight", "accuracy %", "change in points (95%)", "similarity"]
    header += ["absmax accuracy %", "absmax similarity"]
    dense = rows["minilm/dense"]
    size, accuracy = f"{dense['bytes'] / 1e6:.1f}", f"{100 * dense['accuracy']:.1f}"
    lines = [["fp32", "", size, "32.00", accuracy, "", "1.000", "", ""]]
    for bits, group, row, reference in cells(rows, "minilm"):
        size, width = f"{row['bytes'] / 1e6:.1f}", f"{row['bits_per_weight']:.2f}"
        accuracy, change = f"{100 * row['accuracy']:.1f}", points(row["accuracy_difference"])
        plain = ["", ""]
        if reference:
            plain = [f"{100 * reference['accuracy']:.1f}", f"{reference['similarity']:.3f}"]
        lines.append([bits, group, size, width, accuracy, change, f"{row['similarity']:.3f}", *plain])
    return table(header, lines)


def shuffles_line(rows: dict) -> str:
    """What the same point gives under other orders of the channels."""
    key = "smollm2/4/g64/rtn"
    found = [rows[key], *(row for name, row in rows.items() if name.startswith(f"{key}/shuffle"))]
    losses = [row["nll_difference"][0] for row in found]
    values = ", ".join(number(row["perplexity"]) for row in found)
    spread = 100 * statistics.stdev(losses)
    return (
        f"4 bits in groups of 64 under {len(found)} shuffles of the channels: perplexity {values}; the standard "
        f"deviation between shuffles is {spread:.1f} % of perplexity."
    )


def products_table(rows: dict) -> str:
    """Speed against torch's product (WITHOUT_BFLOAT16 says which) of each kernel and scheme, worst shape to best."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for key, row in rows.items():
        kernel, _, many = key.split()
        dense = row["products"]["fp32" if kernel in WITHOUT_BFLOAT16 else "bf16"]["us"]
        for name, product in row["products"].items():
            scheme = f"torch {name}" if name in ("bf16", "fp32") else name
            found.setdefault((kernel, scheme), {}).setdefault(int(many.removeprefix("M=")), []).append(
                dense / product["us"]
            )
    every = sorted({many for ratios in found.values() for many in ratios})
    body = [
        [kernel, name, *(span(ratios[many]) if many in ratios else "" for many in every)]
        for (kernel, name), ratios in found.items()
    ]
    return table(["kernel", "scheme", *(f"M={many}" for many in every)], body)


def generate_table(content: dict) -> str:
    """Decode and prefill of each candidate in turns with dense bfloat16, and what its weights take in memory."""
    body = []
    for key, row in content["rows"].items():
        name, how = key.rsplit(", ", 1)
        decode, prefill, memory = row["decode"], row["prefill"], row["memory"]
        size = ("", "") if memory is None else (f"{memory[part] / 1e6:.0f}" for part in ("weights", "resident"))
        body.append([name, how, f"{decode['after']:.1f}", f"{decode['ratio']:.2f}", f"{prefill['after']:.0f}",
                     f"{prefill['ratio']:.2f}", *size])  # fmt: skip
    return table(["model, linear layers, output layer", "step", "decode, tokens/s", "times bf16", "prompt, tokens/s",
                  "times bf16", "weights, MB", "resident after loading, MB"], body)  # fmt: skip


def span(ratios: list[float]) -> str:
    """Lowest to highest."""
    low, high = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
    return low if low == high else f"{low} - {high}"


def conditions(content: dict) -> str:
    """One line that says where and with what the figures were made."""
    machine, versions = content["machine"], content["versions"]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    dates = sorted(session["started"].split()[0] for session in content["sessions"])
    threads = sorted({session["threads"] for session in content["sessions"]})
    return (
        f"Measured {dates[0]}{' to ' + dates[-1] if dates[-1] != dates[0] else ''} on {machine['cpu']} "
        f"({', '.join(machine['instruction_sets'])}), {' or '.join(map(str, threads))} threads; {software}."
    )


def write(folder: Path = RESULTS, docs: Path = ROOT / "docs") -> None:
    """Bring the pages in docs/ up to date with what has been measured."""
    content = json.loads((folder / "quality.json").read_text())
    path = docs / "quality.md"
    page = path.read_text()
    page = replace_between(page, "conditions", conditions(content))
    for name, make in (("smollm2", smollm2_table), ("minilm", minilm_table)):
        if f"{name}/dense" in content["rows"]:
            page = replace_between(page, name, make(content["rows"]))
    if any("/shuffle" in key for key in content["rows"]):
        page = replace_between(page, "shuffles", shuffles_line(content["rows"]))
    path.write_text(page)
    print(f"tables: {path}")
    path = docs / "performance.md"
    page = path.read_text()
    if (folder / "linear.json").exists():
        content = json.loads((folder / "linear.json").read_text())
        page = replace_between(page, "conditions", conditions(content))
        page = replace_between(page, "products", products_table(content["rows"]))
    if (folder / "generate.json").exists():
        content = json.loads((folder / "generate.json").read_text())
        page = replace_between(page, "generate", f"{generate_table(content)}\n\n{conditions(content)}")
    path.write_text(page)
    print(f"tables: {path}")


if __name__ == "__main__":
    write()
