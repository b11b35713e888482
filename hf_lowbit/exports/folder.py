"""A folder in transformers' form for an export: weights in shards, config with another `quantization_config`."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from torch import Tensor

from .source import Source


def save_folder(
    source: Source,
    folder: Path,
    tensors: dict[str, Tensor],
    quantization: dict,
    max_shard_size: int | str,
    changes: dict | None = None,
) -> None:
    """Write `tensors`, the model's config with `quantization` in it (and `changes` of top-level fields), generation
    config and tokenizer."""
    save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size, metadata={"format": "pt"})
    config = copy.deepcopy(source.model.config)
    config.quantization_config = quantization
    config.architectures = config.architectures or [_dense_name(source)]
    config.dtype = str(source.dtype).removeprefix("torch.")
    fields = json.loads(config.to_json_string(use_diff=True)) | (changes or {})
    # what transformers notes about the folder a model came from
    fields.pop("_name_or_path", None)
    fields["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    source.save_parts(folder)


def _dense_name(source: Source) -> str:
    return type(source.model).__name__
