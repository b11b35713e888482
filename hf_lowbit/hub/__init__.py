"""Sharing on the Hugging Face Hub: model cards made of facts, and pushing a model together with one."""

from __future__ import annotations

import importlib


_HOME = {"push_to_hub": "push", "render_card": "card", "write_card_beside": "card", "install": "plain_push"}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    # loaded on use: `hf_lowbit` asks only for `install` when it registers with transformers
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
