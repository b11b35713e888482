"""Plain-text tables for people."""

from __future__ import annotations


def megabytes(count: int) -> str:
    """Bytes as MB with three significant decimals at most."""
    return f"{count / 1e6:.3f}" if count < 1e6 else f"{count / 1e6:.1f}"


def render_table(header: list[str], rows: list[list[str]]) -> str:
    """Columns padded to their widest cell; the first left-aligned, numbers as given."""
    table = [header, *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([lines[0], "-" * min(sum(widths) + 2 * len(widths), 119), *lines[1:]])
