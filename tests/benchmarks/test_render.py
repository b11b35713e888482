"""Tables: written between markers, from the results alone."""

import math

import pytest

from benchmarks.render import (
    minilm_table,
    number,
    percent,
    products_table,
    replace_between,
    shuffles_line,
    smollm2_table,
)


PAGE = "before\n<!-- begin x -->\nold\n<!-- end x -->\nafter\n"
SIZES = {"bytes": 2_000_000, "bits_per_weight": 4.25}


def test_only_the_text_between_the_markers_changes():
    once = replace_between(PAGE, "x", "new")
    assert once == "before\n<!-- begin x -->\n\nnew\n\n<!-- end x -->\nafter\n"
    assert replace_between(once, "x", "new") == once


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="no markers <!-- begin y -->"):
        replace_between(PAGE, "y", "new")


@pytest.mark.parametrize(("value", "text"), [(39.444, "39.44"), (123456.0, "1e5"), (2e30, "2e30"), (math.inf, "inf")])
def test_number(value, text):
    assert number(value) == text


def test_percent():
    assert percent([math.log(1.1), math.log(1.05), math.log(1.2)]) == "+10.0 % (+5.0 to +20.0)"
    assert percent([500.0, 1.0, 900.0]) == "over tenfold"


def test_language_model_rows_without_a_reference_are_still_shown():
    rows = {
        "smollm2/dense": {"bytes": 4_000_000, "perplexity": 40.0},
        "smollm2/4/g64/rtn": {**SIZES, "perplexity": 44.0, "nll_difference": [0.0953, 0.09, 0.1]},
    }
    assert smollm2_table(rows).splitlines()[-1] == "| 4 | 64 | 2.0 | 4.25 | 44.00 | +10.0 % (+9.4 to +10.5) |  |"


def test_encoder_rows():
    dense = {"bytes": 4_000_000, "accuracy": 0.6, "similarity": 1.0}
    row = {**SIZES, "accuracy": 0.58, "similarity": 0.99, "accuracy_difference": [-0.02, -0.04, 0.0]}
    rows = {"minilm/dense": dense, "minilm/4/channel/rtn": row, "minilm/4/channel/absmax": row}
    last = minilm_table(rows).splitlines()[-1]
    assert last == "| 4 | channel | 2.0 | 4.25 | 58.0 | -2.0 (-4.0 to +0.0) | 0.990 | 58.0 | 0.990 |"


def test_shuffles_are_told_with_their_spread():
    rows = {
        "smollm2/4/g64/rtn": {"perplexity": 50.0, "nll_difference": [0.20, 0.1, 0.3]},
        "smollm2/4/g64/rtn/shuffle1": {"perplexity": 51.0, "nll_difference": [0.22, 0.1, 0.3]},
        "smollm2/4/g64/absmax": {"perplexity": 90.0, "nll_difference": [0.9, 0.8, 1.0]},
    }
    assert "under 2 shuffles of the channels: perplexity 50.00, 51.00;" in shuffles_line(rows)
    assert "is 1.4 % of perplexity" in shuffles_line(rows)


def test_products_tell_their_worst_and_best_shape():
    def row(low, high):
        ratios = {"bf16": 1.0, "fp32": 0.5, "int4": low if high else 2.0}
        return {"products": {name: {"us": 100.0 / ratio} for name, ratio in ratios.items()}}

    rows = {
        "cpu-amx 8x8 M=1": row(3.0, True),
        "cpu-amx 8x16 M=1": row(4.96, True),
        "cpu-amx 8x8 M=8": row(0, False),
    }
    assert products_table(rows).splitlines() == [
        "| kernel | scheme | M=1 | M=8 |",
        "| --- | --- | ---: | ---: |",
        "| cpu-amx | torch bf16 | 1.0 | 1.0 |",
        "| cpu-amx | torch fp32 | 0.5 | 0.5 |",
        "| cpu-amx | int4 | 3.0 - 5.0 | 2.0 |",
    ]
