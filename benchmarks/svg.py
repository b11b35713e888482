"""Plots as SVG text: lines and points on linear or logarithmic axes, by the standard library alone.

A plot is a function of its numbers: the same results give the same bytes, so that a change of a plot in a commit is a
change of a figure.
"""

import math
from dataclasses import dataclass
from html import escape


WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 210, 36, 52
COLOURS = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f", "#bcbd22", "#e377c2",
    "#000000",
)  # fmt: skip


@dataclass(frozen=True)
class Series:
    """Points (x, y) with a name; joined by a line, or marked alone."""

    name: str
    points: list[tuple[float, float]]
    line: bool = True
    marks: bool = True
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """From low to high; ticks are powers of ten and their 2 and 5 on a logarithmic axis."""

    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at low, 1 at high."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            wide = self.high / self.low > 2000
            found = [m * 10.0**p for p in powers for m in ((1,) if wide else (1, 2, 5))]
        else:
            rough = (self.high - self.low) / 5
            step = min((m * 10 ** math.floor(math.log10(rough)) for m in (1, 2, 5, 10)), key=lambda s: abs(s - rough))
            found = [step * i for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [value for value in found if self.low <= value * (1 + 1e-9) and value <= self.high * (1 + 1e-9)]


def axis(label: str, values: list[float], log: bool = False) -> Axis:
    """An axis that holds all values, with some room. ValueError for no values, or ones a logarithm cannot show."""
    if not values:
        raise ValueError(f"{label!r}: there is nothing to plot.")
    low, high = min(values), max(values)
    if log and low <= 0:
        raise ValueError(f"{label!r}: {low} cannot stand on a logarithmic axis.")
    if log:
        return Axis(label, low / 1.2, high * 1.2, True)
    room = (high - low or abs(high) or 1.0) * 0.06
    return Axis(label, low - room, high + room)


def plot(title: str, x: Axis, y: Axis, series: list[Series]) -> str:
    """The SVG text."""
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(point) -> tuple[float, float]:
        return LEFT + across * x.place(point[0]), TOP + up * (1 - y.place(point[1]))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH - RIGHT, 20, title, "end", 14),
        f'<rect x="{LEFT}" y="{TOP}" width="{across}" height="{up}" fill="none" stroke="#444"/>',
    ]
    for value in x.ticks():
        place = LEFT + across * x.place(value)
        parts.append(f'<path d="M{place:.1f} {TOP}V{TOP + up}" stroke="#ddd"/>')
        parts.append(_text(place, TOP + up + 16, f"{value:g}", "middle"))
    for value in y.ticks():
        place = TOP + up * (1 - y.place(value))
        parts.append(f'<path d="M{LEFT} {place:.1f}H{LEFT + across}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, place + 4, f"{value:g}", "end"))
    parts.append(_text(LEFT + across / 2, HEIGHT - 12, x.label, "middle"))
    parts.append(
        f'<text transform="translate(16 {TOP + up / 2:.1f}) rotate(-90)" text-anchor="middle">{escape(y.label)}</text>'
    )
    for index, one in enumerate(series):
        colour, places = COLOURS[index % len(COLOURS)], [at(point) for point in one.points]
        if one.line and places:
            path = "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
            dash = ' stroke-dasharray="5 4"' if one.dashed else ""
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>')
        if one.marks:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in places]
        height = TOP + 10 + 18 * index
        parts.append(f'<circle cx="{WIDTH - RIGHT + 14}" cy="{height}" r="4" fill="{colour}"/>')
        parts.append(_text(WIDTH - RIGHT + 24, height + 4, one.name, "start"))
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, words: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'
