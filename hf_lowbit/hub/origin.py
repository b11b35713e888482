"""Where a low-bit model comes from: the Hub id of its base, and what the base's card says about licence and language.

The rules, in one place:

- A local path is never published. A base that was loaded from a folder is named only if its Hub id is certain: the
  folder lies in the Hub cache, or its config records the id and nothing shows that it was trained further since.
- A model that was loaded already low-bit has the base that its own card names.
- Licence, languages and task are carried over from the base's card and never guessed. What is not of the expected form
  is left out.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from .facts import read_json
from .readme import UNREADABLE


CARRIED = {
    "license": r"[a-z0-9][a-z0-9.+-]{0,63}",
    "license_name": r"[\w .+-]{1,96}",
    "license_link": r"https?://[\w./%#?=&-]{1,300}|[\w.-]{1,100}",
    "language": r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|multilingual|code",
    "pipeline_tag": r"[a-z0-9-]{1,60}",
}
# of these a card may name several
MANY = ("license", "language")
TRAINING_TRACES = ("training_args.bin", "trainer_state.json")


@dataclass
class Origin:
    """The base model as far as it may be told. `local`: it was a folder without a known Hub id."""

    base_id: str | None = None
    local: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


def find(model_or_dir: Any, base_model=None, base_card=None, token=None, online: bool = True) -> Origin:
    """The origin of a model in memory or of a checkpoint folder; arguments win over what is found.

    `base_card`: the base's README as ModelCard, text, file or folder. `online`: ask the Hub for it where it is not on
    this machine; a Hub that does not answer means no licence, never an error.
    """
    folder, repo_id, is_lowbit = _source(model_or_dir) if base_model is None else (*_place(base_model), False)
    card = _read(base_card) if base_card is not None else None
    if card is None and folder is not None:
        card = _read(folder)
    if folder is not None:
        repo_id = _published_id(folder, card)
    if card is None and repo_id is not None:
        card = _fetch(repo_id, token, online)
    metadata = card.data if card is not None else ModelCardData()
    if is_lowbit:
        base = metadata.get("base_model")
        known = metadata.get("base_model_relation") == "quantized" and is_repo_id(base)
        return Origin(base if known else None, False, _carried(metadata, base if known else None))
    return Origin(repo_id, folder is not None and repo_id is None, _carried(metadata, repo_id))


def is_repo_id(name: Any) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return isinstance(name, str)


def _source(model_or_dir) -> tuple[Path | None, str | None, bool]:
    """(folder, Hub id, is it low-bit already) of what the model was loaded from."""
    if isinstance(model_or_dir, (str, os.PathLike)):
        return Path(model_or_dir), None, True
    config = model_or_dir.config
    pre_quantized = bool(getattr(getattr(model_or_dir, "hf_quantizer", None), "pre_quantized", False))
    name = getattr(config, "_name_or_path", "") or ""
    if os.path.isdir(name):
        return Path(name), None, pre_quantized
    # what came from the Hub left its config in the cache; without it the name may be a path that is gone by now
    from_hub = is_repo_id(name) and isinstance(try_to_load_from_cache(name, "config.json"), str)
    return None, name if from_hub else None, pre_quantized


def _place(base_model) -> tuple[Path | None, str | None]:
    if os.path.isdir(base_model):
        return Path(base_model), None
    if not is_repo_id(base_model):
        raise ValueError(
            f"`base_model`={str(base_model)!r} is neither an existing folder nor a Hub id such as 'org/name'; "
            "leave it out to use what the model was loaded from."
        )
    return None, base_model


def _published_id(folder: Path, card: ModelCard | None) -> str | None:
    cached = [part for part in folder.absolute().parts if part.startswith("models--")]
    if cached and folder.absolute().parent.name == "snapshots":
        repo_id = cached[-1].removeprefix("models--").replace("--", "/")
        return repo_id if is_repo_id(repo_id) else None
    if not (folder / "config.json").is_file() or any((folder / name).exists() for name in TRAINING_TRACES):
        return None
    repo_id = read_json(folder / "config.json").get("_name_or_path")
    if not is_repo_id(repo_id) or "/" not in repo_id or os.path.isdir(repo_id):
        return None
    # a card that names it as its base: the folder is a descendant of that model, not that model
    named = card.data.get("base_model") if card is not None else None
    return None if repo_id in (named if isinstance(named, list) else [named]) else repo_id


def _read(card) -> ModelCard | None:
    """A card from a ModelCard, its text, a file or a folder; None where there is none that can be parsed."""
    if isinstance(card, ModelCard):
        return card
    if not isinstance(card, (str, os.PathLike)):
        raise TypeError(f"`base_card` is a {type(card).__name__}; pass a ModelCard, its text, a file or a folder.")
    if isinstance(card, os.PathLike) or "\n" not in card:
        path = Path(card)
        path = path / "README.md" if path.is_dir() else path
        if not path.is_file():
            return None
        card = path.read_text(encoding="utf-8-sig", errors="replace")
    return parse(card)


def parse(text: str) -> ModelCard | None:
    """The card in `text`, or None where its metadata block is broken: a stranger's card must not stop ours."""
    try:
        return ModelCard(text, ignore_metadata_errors=True)
    except UNREADABLE:
        return None


def _fetch(repo_id: str, token, online: bool) -> ModelCard | None:
    path = try_to_load_from_cache(repo_id, "README.md")
    if not isinstance(path, str):
        if not online:
            return None
        try:
            path = hf_hub_download(repo_id, "README.md", token=token)
        # no network, no such file, no access: in each case nothing is known about the base
        except (OSError, ValueError, HTTPError):
            return None
    return _read(Path(path))


def _carried(metadata: ModelCardData, repo_id: str | None) -> dict[str, Any]:
    carried = {}
    for name, pattern in CARRIED.items():
        value = metadata.get(name)
        values = value if isinstance(value, list) else [value]
        fitting = [item for item in values if isinstance(item, str) and re.fullmatch(pattern, item)]
        if fitting:
            carried[name] = fitting if isinstance(value, list) and name in MANY else fitting[0]
    link = carried.get("license_link")
    if link is not None and "://" not in link:
        # a file of the base's repository; here the name alone would point nowhere
        if repo_id is None:
            del carried["license_link"]
        else:
            carried["license_link"] = f"https://huggingface.co/{repo_id}/blob/main/{link}"
    return carried
