"""What an unfinished stage has done so far, beside the output folder: so that it goes on where it was interrupted.

A folder `.<name>.part` holds `run.json`, what the run depends on, and a file for each finished weight or block: its
tensors, and in the file's metadata what else is needed. A file appears whole or not at all. The folder goes when the
stage is saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


RUN = "run.json"


class Journal:
    """Finished parts of stages of the run that `identity` stands for, in `.<name>.part` beside `folder`."""

    def __init__(self, folder: Path, identity: dict[str, str], resume: bool):
        self.folder = folder.with_name(f".{folder.name}.part")
        known = self._identity()
        if known is not None and resume:
            changed = [part for part, value in identity.items() if known.get(part) != value]
            if changed:
                raise ValueError(
                    f"`output_dir`={str(folder)!r} was begun by a run with another {' and another '.join(changed)}, "
                    "which is not finished; name another folder, or pass resume=False to begin anew there."
                )
        elif self.folder.exists():
            shutil.rmtree(self.folder)
        self.identity = identity

    def __deepcopy__(self, memo):
        # configs are copied, the files are one
        return self

    def find(self, stage: str, key: str) -> tuple[dict[str, Tensor], Any] | None:
        """Tensors and facts of a finished part, or None."""
        path = self._path(stage, key)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name).clone() for name in file.keys()}, json.loads(
                    file.metadata()["facts"]
                )
        except (SafetensorError, OSError, ValueError, KeyError, TypeError):
            # damaged by something else than us: done again
            return None

    def keep(self, stage: str, key: str, tensors: dict[str, Tensor], facts: Any) -> None:
        """Write down a finished part. Raises OSError when the disk is full."""
        if not (self.folder / RUN).is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(self.folder / RUN, lambda path: path.write_text(json.dumps(self.identity)))
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        metadata = {"facts": json.dumps(facts)}
        _replace(self._path(stage, key), lambda path: save_file(tensors, path, metadata))

    def clear(self) -> None:
        """Forget all parts: the stage is saved as a whole."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, stage: str, key: str) -> Path:
        # names of modules may be long, and hold what a file system does not take
        return self.folder / f"{stage}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.safetensors"

    def _identity(self) -> dict | None:
        try:
            return json.loads((self.folder / RUN).read_text())
        except (OSError, ValueError):
            return None


def _replace(path: Path, write) -> None:
    fresh = path.with_suffix(".new")
    write(fresh)
    os.replace(fresh, path)
