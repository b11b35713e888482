"""Text for a model card: foreign strings made harmless, tables, and numbers a person can read.

Whatever comes from a config, a base model's card or a user's results is data, and may hold pipes, newlines, HTML or
Markdown. `plain` shows such text as it is written, without a link, a tag or a table cell coming out of it; `code`
is for identifiers and keeps only the characters those are made of.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence


LONGEST_TEXT = 200


def plain(value: object) -> str:
    """`value` on one line, with every character that Markdown or HTML would act on written as itself."""
    line = " ".join(str(value).split())
    if len(line) > LONGEST_TEXT:
        line = line[: LONGEST_TEXT - 3] + "..."
    line = html.escape(line, quote=False)
    line = re.sub(r"([\\`*_{}\[\]()#+!|~$])", r"\\\1", line)
    # addresses become links without any markup around them
    return re.sub(r"(?i)(https?|ftp|mailto|www)([:.])", lambda m: f"{m[1]}&#{ord(m[2])};", line).replace("@", "&#64;")


def code(value: object) -> str:
    """`value` as a code span, reduced to the characters of module names, repository ids and patterns."""
    return "`" + re.sub(r"[^\w.:/*+\- ]", "?", str(value), flags=re.ASCII)[:LONGEST_TEXT] + "`"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the cells are Markdown already. Columns whose header starts with "#" are right-aligned."""
    lines = [header_line := [name.lstrip("#") for name in header]]
    lines.append(["---:" if name.startswith("#") else "---" for name in header])
    lines += [[str(cell) for cell in row] for row in rows]
    assert all(len(line) == len(header_line) for line in lines), "every row has a cell for each column"
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def size(count: float) -> str:
    """Bytes in decimal units, as the Hub shows them: 80.1 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:,.0f} bytes" if unit == "bytes" else f"{count:,.1f} {unit}"
