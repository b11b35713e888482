"""The picture of docs/compress.md, perplexity against bytes, made from benchmarks/results/compress.json.

    python -m benchmarks.render_compress

One mark a row of the permuted model, one line a method, the dense model as a dashed line. Both axes are logarithmic.
Written as SVG by hand: a page of text that needs no library and stays small.
"""

import json
import math
from pathlib import Path

from benchmarks.record import RESULTS, ROOT


WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 20, 50
METHODS = {
    "rtn": ("rounding", "#b0413e"),
    "gptq": ("layer stage", "#2f6690"),
    "planned": ("planned layers", "#3a7d44"),
    "budget": ("planned, with the tables", "#8a5a9e"),
    "stages": ("all stages", "#d08c2e"),
}
# higher perplexities than this many times the dense one are drawn at the upper edge, as arrows
CEILING = 8.0


def points(rows: dict) -> dict[str, list[tuple[str, float, float]]]:
    """method -> (bits, megabytes, perplexity) of its rows, from small to large."""
    found: dict[str, list] = {}
    for key, row in rows.items():
        bits, _, method = key.partition("/")
        if method in METHODS and bits.isdigit():
            found.setdefault(method, []).append((bits, row["bytes"] / 1e6, row["perplexity"]))
    return {method: sorted(found[method], key=lambda point: point[1]) for method in METHODS if method in found}


def ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from `low` to `high`, as many as `most` allows."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(s for s in (power, 2 * power, 5 * power, 10 * power) if (high - low) / s <= most)
    return [step * count for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


class Axes:
    """From megabytes and perplexity to the picture."""

    def __init__(self, sizes: list[float], values: list[float]):
        self.x = (min(sizes) / 1.1, max(sizes) * 1.1)
        self.y = (min(values) / 1.1, max(values) * 1.1)

    def across(self, size: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(size / self.x[0]) / math.log(self.x[1] / self.x[0])

    def up(self, value: float) -> float:
        return (
            HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(value / self.y[0]) / math.log(self.y[1] / self.y[0])
        )


def picture(rows: dict) -> str:
    """The SVG. Raises KeyError when the dense row is missing."""
    dense, found = rows["dense"], points(rows)
    top = CEILING * dense["perplexity"]
    sizes = [size for each in found.values() for _, size, _ in each]
    values = [min(value, top) for each in found.values() for *_, value in each]
    axes = Axes(sizes, [dense["perplexity"], *values])
    parts = []
    for tick in ticks(*axes.x):
        x = axes.across(tick)
        parts.append(line(x, TOP, x, HEIGHT - BOTTOM, "#ddd"))
        parts.append(text(x, HEIGHT - BOTTOM + 18, f"{tick:g}", "middle"))
    for tick in ticks(*axes.y):
        y = axes.up(tick)
        parts.append(line(LEFT, y, WIDTH - RIGHT, y, "#ddd"))
        parts.append(text(LEFT - 8, y + 4, f"{tick:g}", "end"))
    y = axes.up(dense["perplexity"])
    parts.append(line(LEFT, y, WIDTH - RIGHT, y, "#333", dashed=True))
    parts.append(text(WIDTH - RIGHT + 8, y + 4, f"dense, {dense['bytes'] / 1e6:.0f} MB", "start"))
    for number, (method, each) in enumerate(found.items()):
        name, colour = METHODS[method]
        places = [(axes.across(size), axes.up(min(value, top))) for _, size, value in each]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for (bits, _, value), (x, y) in zip(each, places, strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
            label = f"{bits}" if value <= top else f"{bits} (↑ {value:.0f})"
            parts.append(text(x + 6, y - 6, label, "start", colour))
        parts.append(text(WIDTH - RIGHT + 8, TOP + 16 * (number + 1), name, "start", colour))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "megabytes", "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">perplexity</text>'
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dash}/>'


def text(x: float, y: float, words: str, anchor: str, colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def write(folder: Path = RESULTS, docs: Path = ROOT / "docs") -> Path:
    rows = json.loads((folder / "compress.json").read_text())["rows"]
    path = docs / "compress.svg"
    path.write_text(picture(rows), encoding="utf-8")
    return path


if __name__ == "__main__":
    print(f"picture: {write()}")
