"""The picture of compression shows the rows that were measured, and is the one beside the page."""

import json
import xml.etree.ElementTree as ElementTree

from benchmarks import render_compress
from benchmarks.record import RESULTS, ROOT


ROWS = {
    "dense": {"bytes": 400e6, "perplexity": 40.0},
    "4/rtn": {"bytes": 120e6, "perplexity": 50.0},
    "2/rtn": {"bytes": 80e6, "perplexity": 5e4},
    "4/gptq": {"bytes": 120e6, "perplexity": 44.0},
    "shipped/4/gptq": {"bytes": 120e6, "perplexity": 20.0},
}


def elements(svg: str, tag: str):
    return ElementTree.fromstring(svg).findall(f"{{http://www.w3.org/2000/svg}}{tag}")


def test_one_mark_a_row_inside_of_the_axes():
    svg = render_compress.picture(ROWS)
    marks = elements(svg, "circle")
    # the other model has a page of its own to be on
    assert len(marks) == 3
    assert all(render_compress.LEFT <= float(m.get("cx")) <= render_compress.WIDTH for m in marks)
    assert all(render_compress.TOP <= float(m.get("cy")) <= render_compress.HEIGHT for m in marks)
    words = [t.text for t in elements(svg, "text")]
    assert "2 (↑ 50000)" in words and "rounding" in words and "layer stage" in words and "all stages" not in words


def test_lower_perplexity_is_lower_in_the_picture():
    heights = {m.get("fill"): float(m.get("cy")) for m in elements(render_compress.picture(ROWS), "circle")}
    rounded, solved = (render_compress.METHODS[name][1] for name in ("rtn", "gptq"))
    assert heights[solved] > heights[rounded]


def test_ticks_are_round_and_few():
    assert render_compress.ticks(92, 124) == [95, 100, 105, 110, 115, 120]
    assert render_compress.ticks(35, 341) == [50, 100, 150, 200, 250, 300]


def test_the_picture_in_the_docs_is_of_what_was_measured():
    rows = json.loads((RESULTS / "compress.json").read_text())["rows"]
    page = ROOT / "docs" / "compress.svg"
    assert page.read_text(encoding="utf-8") == render_compress.picture(rows)
    assert "(compress.svg)" in (ROOT / "docs" / "compress.md").read_text()
    assert page.stat().st_size < 20_000
