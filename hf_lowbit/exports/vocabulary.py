"""A byte-level BPE tokenizer as llama.cpp's metadata.

llama.cpp does not read tokenizer.json: it has the vocabulary, the merges, a type for each token, and the name of the
rule that splits text before the merges. That rule must be one it knows by name, or it would cut text elsewhere than
the tokenizer does; an unknown one is refused.
"""

from __future__ import annotations

import json
from typing import Any


# gguf.TokenType
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def add_vocabulary(writer: Any, tokenizer: Any, size: int) -> None:
    """Write `tokenizer` into a gguf.GGUFWriter, filled up to `size` tokens."""
    state = _state(tokenizer)
    words = {number: word for word, number in state["model"]["vocab"].items()}
    types = dict.fromkeys(words, NORMAL)
    for added in state["added_tokens"]:
        words[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting_rule(state))
    writer.add_token_list([words.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([types.get(number, UNUSED) for number in range(size)])
    merges = state["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id", None)
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        writer.add_chat_template(template)
    begin = tokenizer("a", add_special_tokens=True).input_ids
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and begin[:1] == [tokenizer.bos_token_id])


def check_vocabulary(tokenizer: Any, size: int) -> None:
    """Raise ValueError when `tokenizer` is missing, of another kind, or larger than the model's `size` rows."""
    if tokenizer is None:
        raise ValueError("`format`='gguf' holds the tokenizer too, and none was found; pass `tokenizer=`.")
    state = _state(tokenizer)
    splitting_rule(state)
    if len(tokenizer) > size:
        raise ValueError(
            f"`tokenizer` has {len(tokenizer)} tokens, the model {size} rows; pass the model's tokenizer."
        )


def splitting_rule(state: dict) -> str:
    """llama.cpp's name for the pre-tokenizer of a tokenizer.json. Raises ValueError where it has none."""
    steps = state.get("pre_tokenizer") or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    plain = state.get("normalizer") is None and steps[-1].get("type") == "ByteLevel"
    if plain and steps[-1].get("use_regex", True) and not steps[-1].get("add_prefix_space"):
        if len(steps) == 1:
            return "gpt-2"
        if len(steps) == 2 and steps[0].get("type") == "Digits" and steps[0].get("individual_digits"):
            return "smollm"
    kinds = ", ".join(str(step.get("type")) for step in steps)
    raise ValueError(
        f"`format`='gguf' needs a tokenizer that splits text as GPT-2's or SmolLM's does, and the rule of this one "
        f"({kinds}) has no name that we know in llama.cpp; export as compressed-tensors or gemma."
    )


def _state(tokenizer: Any) -> dict:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else {}
    if state.get("model", {}).get("type") != "BPE" or state["model"].get("byte_fallback"):
        kind = state.get("model", {}).get("type", type(tokenizer).__name__)
        raise ValueError(
            f"`format`='gguf' is written for byte-level BPE tokenizers, and this is a {kind}; export as "
            "compressed-tensors or gemma."
        )
    return state
