"""The output folder of a compression: written whole or not at all, by one process, and continued only by its own run.

A stage's checkpoint is written into a folder beside, which then takes the place of the former: whatever is called
finished is whole. `compression.json` holds what the run depends on, which stages are done, and their figures.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import nn
from transformers import AutoConfig


STATE = "compression.json"


def fingerprint(model: nn.Module) -> str:
    """A hash of a model's weights."""
    weights = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        weights.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        weights.update(_bytes(tensor))
    return weights.hexdigest()


def fingerprint_of_data(batches: Iterable[dict] | None) -> str:
    """A hash of calibration data."""
    data = hashlib.sha256()
    for batch in batches or ():
        for name, value in sorted(batch.items()):
            data.update(name.encode())
            data.update(_bytes(value) if isinstance(value, torch.Tensor) else repr(value).encode())
    return data.hexdigest()


def fingerprint_of_files(name: str | os.PathLike) -> str:
    """What stands for the weights of a checkpoint that is not loaded: a Hub id's commit, or a hash of a folder's
    files of weights."""
    if not os.path.isdir(name):
        return f"{name}@{AutoConfig.from_pretrained(name)._commit_hash}"
    digest = hashlib.sha256()
    for path in sorted(p for p in Path(name).iterdir() if p.suffix in (".safetensors", ".bin")):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                digest.update(part)
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


class Store:
    """The folder; `stages` are the records of those that are done, in the order in which they ran."""

    def __init__(self, folder: str | os.PathLike, identity: dict[str, str], resume: bool):
        self.folder, self.identity = Path(folder), identity
        self.stages: dict[str, dict] = {}
        if not self.folder.exists() or not any(self.folder.iterdir()):
            return
        state = self.folder / STATE
        if not state.is_file():
            raise FileExistsError(f"`output_dir`={str(folder)!r} holds something else; name a new or an empty folder.")
        if not resume:
            return
        found = json.loads(state.read_text())
        changed = [part for part, value in identity.items() if found["identity"].get(part) != value]
        if changed:
            raise ValueError(
                f"`output_dir`={str(folder)!r} holds a run with another {' and another '.join(changed)}; name another "
                "folder, or pass resume=False to begin anew there."
            )
        self.stages = found["stages"]

    def save(self, model, tokenizer, stages: dict[str, dict], report: dict) -> None:
        """Write the model after the last of `stages` and put it in the place of what was there."""
        self.stages = dict(stages)
        fresh, old = (self.folder.with_name(f".{self.folder.name}.{what}") for what in ("new", "old"))
        for rest in (fresh, old):
            shutil.rmtree(rest, ignore_errors=True)
        fresh.mkdir(parents=True)
        try:
            if (self.folder / "README.md").is_file():
                # a card that a person may have written on; saving renews what nobody touched
                shutil.copy2(self.folder / "README.md", fresh)
            model.save_pretrained(fresh)
            if tokenizer is not None:
                tokenizer.save_pretrained(fresh)
            for name, content in (("report.json", report), (STATE, {"identity": self.identity, "stages": stages})):
                (fresh / name).write_text(json.dumps(content, indent=1) + "\n")
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        if self.folder.exists():
            self.folder.rename(old)
        fresh.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def alone(folder: str | os.PathLike):
    """Hold the lock of `folder`; it falls with the process. Raises RuntimeError when another run holds it."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RuntimeError(f"another run is writing `output_dir`={str(folder)!r}: wait, or name another.") from None
    try:
        recover(folder)
        yield
    finally:
        lock.release()


def recover(folder: Path) -> None:
    """A run that was killed between the two renames left only the former checkpoint: give it its name back."""
    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)
