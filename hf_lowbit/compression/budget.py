"""Budgets: what a user says about size, in bytes.

"60MB", "2GiB", 60_000_000      bytes of all parameters, scales included
"40%"                           of the dense model's bytes
None                            free memory of this machine, less what inference needs beside the weights
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any


UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
# tokens whose keys and values must fit beside the weights, where nothing else is said
CONTEXT = 4096


def parse_budget(budget: str | int, dense_bytes: int) -> int:
    """Bytes of `budget`. Raises TypeError and ValueError when it is none."""
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise TypeError(f'`budget`={budget!r} must be bytes, or a text such as "60MB", "2GiB" or "40%".')
    if isinstance(budget, int):
        size = budget
    else:
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%|[kmg]i?b|b|)\s*", budget.lower())
        if found is None:
            raise ValueError(f'`budget`={budget!r} is no size; write bytes, "60MB", "2GiB" or "40%".')
        number, unit = float(found[1]), found[2]
        size = int(number / 100 * dense_bytes) if unit == "%" else int(number * UNITS[unit])
    if size <= 0:
        raise ValueError(f"`budget`={budget!r} is {size} bytes; it must be positive.")
    return size


def cache_bytes(config: Any, context: int = CONTEXT) -> int:
    """Bytes of the keys and values of `context` tokens in two-byte floats; 0 for models without a decoder's config."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads = getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None)
    width = getattr(text, "hidden_size", None)
    if not (layers and heads and width):
        return 0
    size = getattr(text, "head_dim", None) or width // heads
    return 2 * layers * (getattr(text, "num_key_value_heads", None) or heads) * size * context * 2


def free_bytes() -> int:
    """Memory that this machine could still give, of its own accord."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        # without /proc: half of what there is, since others use it too
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        raise ValueError("this system doesn't say how much memory it has; pass `budget` or `bits`.") from None
