"""Matching module names: whole dotted parts, anywhere in the path, or a regular expression anchored at dots.

"mlp.gate" matches `model.layers.0.mlp.gate` and what lies below it, never `mlp.gate_proj`; since a match may start at
any part, a prefix added by a wrapper (`model.`, `base_model.model.`) changes nothing. "re:" patterns follow
`re.search`, with the match starting and ending at a dot or at an end of the name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache


FLAGS = re.compile(r"(?:\(\?[aiLmsux]+\))*")


@lru_cache(maxsize=1024)
def _compile(pattern: str) -> re.Pattern:
    body = pattern[3:] if pattern.startswith("re:") else re.escape(pattern)
    # flags such as (?i) must stand at the very beginning
    flags = FLAGS.match(body).group()
    try:
        return re.compile(rf"{flags}(?:^|(?<=\.))(?:{body[len(flags) :]})(?=\.|$)")
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is not a regular expression: {error}.") from None


def matches(pattern: str, name: str) -> bool:
    """Does `pattern` match the module `name` or one of its parents?"""
    return _compile(pattern).search(name) is not None


def first_match(patterns: Iterable[str], name: str) -> str | None:
    """The first pattern that matches, exact names before patterns; None when none does."""
    patterns = list(patterns)
    if name in patterns:
        return name
    return next((pattern for pattern in patterns if matches(pattern, name)), None)
