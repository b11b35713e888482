"""A line chart as SVG text, from numbers alone: no plotting library, and the same file for the same numbers.

Each series is a list of (x, low, middle, high): a line through the middles, a bar from low to high at each point. The
x axis names just the values that are there. Colors are told apart by the color-blind (Okabe and Ito 2008).
"""

from dataclasses import dataclass
from xml.sax.saxutils import escape


COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 820, 400, 64, 290, 36, 52


@dataclass(frozen=True)
class Series:
    """A line: its name and its points (x, low, middle, high). `flat` draws the one middle over the whole width."""

    name: str
    points: tuple[tuple[float, float, float, float], ...]
    flat: bool = False


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers that cover [low, high] with at most `most` steps between them."""
    span = max(high - low, 1e-9)
    step = next(
        base * 10.0**power for power in range(-6, 7) for base in (1, 2, 5) if span / (base * 10.0**power) <= most - 1
    )
    first = int(low // step)
    found = [round(first * step, 9)]
    while found[-1] < high - 1e-9 or len(found) == 1:
        found.append(round(found[-1] + step, 9))
    return found


def chart(title: str, x_label: str, y_label: str, series: list[Series], x_format: str = "{:g}") -> str:
    """The chart as SVG. Raises ValueError when there is nothing to draw."""
    drawn = [s for s in series if s.points]
    along = [s for s in drawn if not s.flat]
    if not along:
        raise ValueError("a chart needs a series with points; measure something first.")
    xs = sorted({p[0] for s in along for p in s.points})
    marks = ticks(min(p[1] for s in drawn for p in s.points), max(p[3] for s in drawn for p in s.points))
    margin = 0.06 * max(xs[-1] - xs[0], 1e-9) if len(xs) > 1 else 1.0

    def x_of(x: float) -> float:
        return LEFT + (x - xs[0] + margin) / (xs[-1] - xs[0] + 2 * margin) * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - (y - marks[0]) / (marks[-1] - marks[0]) * (HEIGHT - TOP - BOTTOM)

    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    turn = (TOP + bottom) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text((LEFT + right) / 2, 20, title, "middle", "14"),
        _text((LEFT + right) / 2, HEIGHT - 12, x_label, "middle"),
        f'<g transform="rotate(-90 16 {turn:.1f})">{_text(16, turn, y_label, "middle")}</g>',
    ]
    for mark in marks:
        parts += [
            _line(LEFT, y_of(mark), right, y_of(mark), "#dddddd"),
            _text(LEFT - 8, y_of(mark) + 4, f"{mark:g}", "end"),
        ]
    for x in xs:
        parts += [
            _line(x_of(x), bottom, x_of(x), bottom + 5, "#444444"),
            _text(x_of(x), bottom + 20, x_format.format(x), "middle"),
        ]
    parts.append(_line(LEFT, bottom, right, bottom, "#444444"))
    for index, line in enumerate(drawn):
        color, name_y = COLORS[index % len(COLORS)], TOP + 16 + 20 * index
        if line.flat:
            y = y_of(line.points[0][2])
            parts.append(_line(LEFT, y, right, y, color, 'stroke-width="2" stroke-dasharray="6 4"'))
        else:
            points = sorted(line.points)
            path = " ".join(f"{x_of(x):.1f},{y_of(middle):.1f}" for x, _, middle, _ in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
            for x, low, middle, high in points:
                parts.append(_line(x_of(x), y_of(low), x_of(x), y_of(high), color))
                parts.append(f'<circle cx="{x_of(x):.1f}" cy="{y_of(middle):.1f}" r="3.5" fill="{color}"/>')
        dash = ' stroke-dasharray="6 4"' if line.flat else ""
        parts += [
            _line(right + 12, name_y, right + 34, name_y, color, f'stroke-width="2"{dash}'),
            _text(right + 40, name_y + 4, line.name),
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float, color: str, more: str = "") -> str:
    more = f" {more}" if more else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{more}/>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: str = "12") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
