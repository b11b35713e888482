"""A foreign checkpoint's folder: which file holds which tensor, and its other files. Only safetensors are opened, and
only files of the folder itself.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# what belongs to a checkpoint beside its weights: tokenizer, processor, chat template, generation config, card
BESIDE = ("*.json", "*.jinja", "*.model", "*.txt", "*.md")
# what describes the foreign weights
REPLACED = ("config.json", INDEX, "quantize_config.json", "quant_log.csv")


class Checkpoint:
    """The folder of a checkpoint, or the snapshot of a Hub id. `files` are its files of weights, in order."""

    def __init__(self, name: str | os.PathLike):
        self.folder = Path(name)
        if not self.folder.is_dir():
            self.folder = Path(snapshot_download(str(name), allow_patterns=[*BESIDE, "*.safetensors"]))
        self.files = self._files()
        self._where: dict[str, str] = {}
        self._open: dict[str, safe_open] = {}
        for file in self.files:
            for key in self._handle(file).keys():
                self._where[key] = file

    def config(self) -> dict:
        """config.json; a `quantize_config.json` of older GPTQ checkpoints is its `quantization_config`."""
        config = _read_json(self.folder / "config.json")
        older = self.folder / "quantize_config.json"
        if "quantization_config" not in config and older.is_file():
            config["quantization_config"] = {"quant_method": "gptq", **_read_json(older)}
        return config

    def names(self, file: str | None = None) -> list[str]:
        """Names of the tensors, of one file or of all."""
        return [name for name, where in self._where.items() if file in (None, where)]

    def tensor(self, name: str) -> Tensor | None:
        """A tensor, or None where there is none of this name."""
        where = self._where.get(name)
        return None if where is None else self._handle(where).get_tensor(name)

    def copy_rest(self, folder: Path) -> None:
        """Copy what is no weight and describes none."""
        for pattern in BESIDE:
            for path in self.folder.glob(pattern):
                if path.is_file() and path.name not in REPLACED:
                    shutil.copyfile(path, folder / path.name)

    def _files(self) -> list[str]:
        index = self.folder / INDEX
        if not index.is_file():
            if (self.folder / SINGLE).is_file():
                return [SINGLE]
            found = sorted(path.name for path in self.folder.glob("*.safetensors"))
            if len(found) == 1:
                return found
            raise ValueError(
                f"`{self.folder}` has no {SINGLE} and no index of several; files of other kinds (.bin, .pt) are "
                "pickles, which can run code, and are never opened."
            )
        files = sorted(set(_read_json(index).get("weight_map", {}).values()))
        for file in files:
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"{INDEX} names {file!r}, which is no safetensors file of its own folder.")
            if not (self.folder / file).is_file():
                raise ValueError(f"{INDEX} names {file!r}, which is missing; fetch the checkpoint again.")
        return files

    def _handle(self, file: str):
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"`{file}` can't be read: {error}. It is damaged; fetch it again.") from None
        return self._open[file]


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"`{path.parent}` has no {path.name}: it is no checkpoint.") from None
    except ValueError as error:
        raise ValueError(f"`{path.name}` is no JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"`{path.name}` holds no fields.")
    return content
