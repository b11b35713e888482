"""The memory of this machine as a budget: what is free, less what inference needs beside the weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


# tokens whose keys and values must fit beside the weights, where nothing else is said
CONTEXT = 4096


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
