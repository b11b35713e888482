"""Tables that people read."""

import pytest

from hf_lowbit.compression.table import megabytes, render_table


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0.000"), (999, "0.001"), (123_456, "0.123"), (1_000_000, "1.0"), (269_060_552, "269.1")],
)
def test_megabytes(count, text):
    assert megabytes(count) == text


def test_columns_line_up():
    lines = render_table(["name", "n"], [["a", "1000"], ["longer", "2"]]).splitlines()
    assert lines[0] == "name    n"
    assert set(lines[1]) == {"-"}
    assert lines[2:] == ["a       1000", "longer  2"]


def test_a_table_without_rows_is_its_header():
    assert render_table(["name", "n"], []).splitlines()[0] == "name  n"
