"""Low-bit models in formats that other programs read, one file a format.

    "compressed-tensors"   pack-quantized; transformers with the compressed-tensors package, and vLLM and SGLang
    "gemma"                transformers' own packed layers for Gemma; any model, nothing else to install
    "bitnet"               transformers' own BitNet layers; ternary with one scale a tensor
    "gguf"                 llama.cpp; Llama architectures

(The folder is `exports` and not `export`, since `hf_lowbit.export` is the function.)
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from .output import check_output, whole_folder
from .result import Export


FORMATS = {
    "compressed-tensors": "compressed_tensors",
    "gguf": "gguf_file",
    "gemma": "gemma",
    "bitnet": "bitnet",
}
ACTIVATIONS = (None, "float")


def export(
    model_or_dir: Any,
    output_dir: str | os.PathLike,
    format: str,
    *,
    activations: str | None = None,
    tokenizer: Any = None,
    max_shard_size: int | str = "5GB",
) -> Export:
    """Write a low-bit model in a format that other programs read. Nothing is quantized again: codes are moved, and
    what a format can't hold is refused before anything is written.

    Args:
        model_or_dir: a low-bit model, or the folder or Hub id of one. It is not changed.
        output_dir: a folder that does not exist yet, or is empty.
        format: "compressed-tensors", "gemma", "bitnet" or "gguf".
        activations: None (default) keeps int8 activations or refuses; "float" leaves them out where a format has none,
            so that the reader multiplies the same weights with float activations.
        tokenizer: to save beside it; taken from a folder or Hub id by default. "gguf" can't do without.
        max_shard_size: of weight files, except "gguf".

    Returns:
        An `Export`: where it is, how each module is stored, and which are close instead of exact.

    Raises:
        ValueError: for an unknown format, and for what the format can't hold, naming modules, schemes and what to do.
        FileExistsError: when `output_dir` holds something. ImportError: when "gguf" lacks its package.
    """
    if format not in FORMATS:
        raise ValueError(f"`format`={format!r} is unknown; use one of {list(FORMATS)}.")
    if activations not in ACTIVATIONS:
        raise ValueError(f"`activations`={activations!r} is unknown; use one of {list(ACTIVATIONS)}.")
    output = check_output(output_dir)
    from .source import open_source

    writer = import_module(f".{FORMATS[format]}", __name__)
    source = open_source(model_or_dir, tokenizer)
    writer.check(source, activations)
    with whole_folder(output) as temporary:
        stored, rounded = writer.write(source, temporary, max_shard_size)
    return Export(output, format, stored, rounded)
