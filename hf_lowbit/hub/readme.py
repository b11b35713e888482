"""A card meets a README that is already there: what a person wrote stays, what we wrote and nobody touched is renewed.

Our text ends with a line that holds a digest of it. If the digest still fits, the text is ours and is replaced when
the model is pushed again, so its numbers never belong to an earlier model. Once somebody edits it, it is theirs.
The form that transformers uploads when there is no card (only "More Information Needed") was written by nobody, and
is replaced too.

Metadata is completed. What somebody set stays, except for what the model at hand decides: its base, the tags that
name a bit width, and results for a metric that was measured again.
"""

from __future__ import annotations

import hashlib
import re

import yaml
from huggingface_hub import ModelCard, ModelCardData


SIGNATURE = re.compile(r"\n<!-- hf_lowbit card (\w{16}): renewed with the model unless edited -->\s*$")
# what PyYAML and huggingface_hub raise on a malformed metadata block
UNREADABLE = (yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError, RecursionError)
WIDTH_TAG = re.compile(r"\d-bit|ternary|mixed-precision")


def sign(content: str) -> str:
    """`content` with the digest of its text as the last line."""
    text = ModelCard(content).text
    line = f"<!-- hf_lowbit card {_digest(text)}: renewed with the model unless edited -->"
    return f"{content.rstrip()}\n\n{line}\n"


def merge(existing: str | None, card: ModelCard) -> ModelCard:
    """`card`, or its metadata on the text of `existing` where a person wrote that."""
    if existing is None or not existing.strip():
        return card
    try:
        old = ModelCard(existing)
    except UNREADABLE as error:
        raise ValueError(
            f"the README.md that is already there has a metadata block that cannot be read ({error}); repair the "
            "lines between its --- marks, or delete the file, and try again."
        ) from error
    written = is_written(existing)
    merged = complete(old.data, card.data)
    if not written:
        card.data = merged
        return card
    old.data = merged
    return old


def is_written(content: str | None) -> bool:
    """Whether a person wrote the text: it is neither empty, nor an untouched card of ours, nor transformers' form."""
    if content is None:
        return False
    try:
        text = ModelCard(content, ignore_metadata_errors=True).text.replace("\r\n", "\n")
    except UNREADABLE:
        # `merge` says what is wrong with it
        return True
    signature = SIGNATURE.search(text)
    if signature is not None:
        return signature[1] != _digest(text[: signature.start()])
    return bool(text.strip()) and text.strip() != _empty_form()


def _digest(text: str) -> str:
    return hashlib.sha256(text.replace("\r\n", "\n").strip().encode()).hexdigest()[:16]


def _empty_form() -> str:
    description = (
        "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
        "automatically generated."
    )
    return ModelCard.from_template(ModelCardData(), model_description=description).text.strip()


def complete(old: ModelCardData, new: ModelCardData) -> ModelCardData:
    """`old`, changed: what it lacks, and what the model decides, comes from `new`."""
    for name, value in vars(new).items():
        if value is None:
            continue
        if name == "tags":
            kept = [tag for tag in old.get("tags", []) if not WIDTH_TAG.fullmatch(str(tag)) or tag in value]
            old[name] = kept + [tag for tag in value if tag not in kept]
        elif name == "base_model":
            known = old.get(name)
            old[name] = known if isinstance(known, list) and value in known else value
        elif name == "base_model_relation":
            old[name] = value
        elif name == "eval_results":
            again = [result for result in old.get(name, []) if not any(result.is_equal_except_value(r) for r in value)]
            old[name] = again + value
        elif old.get(name) is None:
            old[name] = value
    return old
