"""Push a low-bit model to the Hub: weights, config, tokenizer, card and report in one commit.

In order: check the arguments and the token, create the repository and the branch, read the README that is there,
save into a temporary folder, render the card, upload. What can fail without moving gigabytes fails first. One
commit, so that a reader never meets a config of one model beside the weights of another; for the same reason weight
files of an earlier push that the new one does not overwrite are deleted with it.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalTokenNotFoundError

from . import origin, readme
from .card import is_lowbit, render_card


logger = logging.getLogger(__name__)

# of a folder, what belongs to a model; logs, optimizer states and pickles stay at home
UPLOADED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py", "LICENSE*", "NOTICE*")
# what save_pretrained writes; a shard of an earlier push would be taken for part of this one
OVERWRITTEN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
# Trainer's log of a checkpoint, with paths of the machine in it
PRIVATE = ("trainer_state.json",)


def push_to_hub(
    model: Any,
    repo_id: str,
    tokenizer: Any = None,
    report: Any = None,
    *,
    base_model: str | os.PathLike | None = None,
    results: Iterable | None = None,
    base_card: Any = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    max_shard_size: int | str = "50GB",
    tags: list[str] | None = None,
) -> CommitInfo:
    """Upload a low-bit model, or the folder of one, with a card made from its facts.

    Args:
        model: a low-bit model, or the folder that `save_pretrained` wrote. The folder is not changed.
        repo_id: "name" or "namespace/name"; created if needed.
        tokenizer: tokenizer or processor to upload beside it.
        report: of `hf_lowbit.report(model)`; None measures now.
        base_model, results, base_card: for the card, see `render_card`.
        private, token, revision, create_pr, commit_message, commit_description, max_shard_size, tags: as in
            `model.push_to_hub`. `private` decides only when the repository is created.

    A README that a person wrote on the Hub keeps its text; its metadata is completed.

    Raises:
        LocalTokenNotFoundError: nobody is logged in and no token was passed.
        HfHubHTTPError: the Hub refused; the first sentence says what to do.
    """
    is_folder = _check(model, repo_id, revision, create_pr)
    if token is False or (not isinstance(token, str) and get_token() is None):
        raise LocalTokenNotFoundError(
            f"pushing to `{repo_id}` needs a Hugging Face token with write access, and none was found; run "
            "`hf auth login`, set the environment variable HF_TOKEN, or pass `token=`."
        )
    api = HfApi(token=token, library_name="hf_lowbit")
    with _explained(repo_id):
        repo_id = _open_repository(api, repo_id, private, revision, create_pr)
        known = read_readme(api, repo_id, revision)
    with TemporaryDirectory() as temporary:
        files = _folder_files(Path(model)) if is_folder else {}
        if not is_folder:
            if report is None:
                from ..compression.report import report as measure

                report = measure(model)
            model.save_pretrained(temporary, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        saved = [path for path in Path(temporary).rglob("*") if path.is_file()]
        files |= {path.relative_to(temporary).as_posix(): path for path in saved}
        card = render_card(model, base_model, report, results, base_card, repo_id=repo_id, token=token)
        card = readme.merge(_text_to_keep(known, Path(model) / "README.md" if is_folder else None, repo_id), card)
        card.data.tags += [tag for tag in tags or [] if tag not in card.data.tags]
        files["README.md"] = str(card).encode()
        if report is not None:
            content = report if isinstance(report, Mapping) else report.to_dict()
            files["report.json"] = (json.dumps(content, indent=2) + "\n").encode()
        additions = [CommitOperationAdd(name, content) for name, content in files.items()]
        with _explained(repo_id):
            return api.create_commit(
                repo_id,
                _deletions(api, repo_id, revision, files) + additions,
                commit_message=commit_message or "Upload low-bit model",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
            )


def _check(model: Any, repo_id: str, revision: str | None, create_pr: bool) -> bool:
    """Refuse what cannot be pushed; whether `model` is a folder."""
    if not origin.is_repo_id(repo_id):
        kind = str(repo_id).split("/")[0]
        hint = f"; models are pushed to a model repository, not to {kind}" if kind in ("datasets", "spaces") else ""
        raise ValueError(f"`repo_id`={repo_id!r} is not of the form 'name' or 'namespace/name'{hint}.")
    if create_pr and revision not in (None, "main"):
        raise ValueError(f"`create_pr`=True opens against the main branch; leave out `revision`={revision!r}.")
    if isinstance(model, (str, os.PathLike)):
        if not Path(model).is_dir():
            raise FileNotFoundError(f"`model`={str(model)!r} is not a folder; pass a low-bit model or its folder.")
        return True
    if not is_lowbit(model) or not hasattr(model, "save_pretrained"):
        raise ValueError(
            f"`model` is a {type(model).__name__}, not a low-bit model; compress it first, or push what is dense with "
            "model.push_to_hub(repo_id)."
        )
    if getattr(model, "peft_config", None):
        raise ValueError(
            "`model` carries adapters, and this pushes the low-bit base; push the adapter with "
            "model.push_to_hub(repo_id), or pass the base model without it."
        )
    return False


def _open_repository(api: HfApi, repo_id: str, private: bool | None, revision: str | None, create_pr: bool) -> str:
    """Create repository and branch where they are missing; the full repository id."""
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if private is not None and api.model_info(repo_id).private != private:
        now = "public" if private else "private"
        logger.warning(f"`private`={private} is not applied: `{repo_id}` exists and is {now}; see its settings.")
    if revision is not None and not revision.startswith("refs/pr/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return repo_id


def read_readme(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    """The README.md of a repository, or None."""
    try:
        path = api.hf_hub_download(repo_id, "README.md", revision=revision)
    except EntryNotFoundError:
        return None
    return Path(path).read_text(encoding="utf-8-sig")


def _text_to_keep(known: str | None, own: Path | None, repo_id: str) -> str | None:
    """The README whose text stays: the Hub's if a person wrote it, else the folder's if a person wrote that."""
    own_text = own.read_text(encoding="utf-8-sig") if own is not None and own.is_file() else None
    if own_text is None or not readme.is_written(own_text):
        return known
    if readme.is_written(known):
        logger.warning(f"the folder's README.md is not uploaded: `{repo_id}` has one already, and its text is kept.")
        return known
    return own_text


def _folder_files(folder: Path) -> dict[str, Path]:
    files = [path for path in folder.iterdir() if path.is_file()]
    files += (folder / "additional_chat_templates").glob("*.jinja")
    kept = [path for path in files if path.name not in PRIVATE and any(fnmatch(path.name, form) for form in UPLOADED)]
    left_out = sorted(path.name for path in set(files) - set(kept) if path.name != "README.md")
    if left_out:
        logger.info(f"not part of the model, and not uploaded: {', '.join(left_out)}")
    return {path.relative_to(folder).as_posix(): path for path in kept}


def _deletions(api: HfApi, repo_id: str, revision: str | None, files: Mapping) -> list[CommitOperationDelete]:
    known = [name for name in api.list_repo_files(repo_id, revision=revision) if OVERWRITTEN.fullmatch(name)]
    return [CommitOperationDelete(name, is_folder=False) for name in known if name not in files]


@contextmanager
def _explained(repo_id: str):
    """Put a sentence a user can act on in front of the Hub's refusal; the error keeps its type."""
    remedies = {
        401: "the Hub does not accept the token; run `hf auth login` again, or pass a valid `token=`",
        403: "the token may not write there; use one with write access to that namespace, your own namespace, or "
        "`create_pr=True`",
        404: "there is no model repository of that name that you can see; a data set or a Space needs another name",
    }
    try:
        yield
    except HfHubHTTPError as error:
        remedy = remedies.get(error.response.status_code)
        if remedy is None:
            raise
        raise type(error)(f"cannot push to `{repo_id}`: {remedy}.\n\n{error}", response=error.response) from error
