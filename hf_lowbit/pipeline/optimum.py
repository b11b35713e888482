"""`compress` behind optimum's interface of a quantizer, for programs that are written against that."""

from __future__ import annotations

import os
from typing import Any

from optimum.quantization_base import OptimumQuantizer
from torch import nn

from .run import Compressed, compress


class LowBitOptimumQuantizer(OptimumQuantizer):
    """`LowBitOptimumQuantizer.from_pretrained(model).quantize(folder, bits=4)` is `hf_lowbit.compress`.

    Args:
        model_or_path: a model, or the folder or Hub id of one.
    """

    def __init__(self, model_or_path: nn.Module | str | os.PathLike):
        self.model_or_path = model_or_path

    @classmethod
    def from_pretrained(cls, model_or_path, file_name: str | None = None) -> LowBitOptimumQuantizer:
        """Nothing is loaded yet. `file_name` is for formats of one file: ValueError."""
        if file_name is not None:
            raise ValueError(f"`file_name`={file_name!r}: a transformers checkpoint is a folder; leave it None.")
        return cls(model_or_path)

    def quantize(self, save_dir: str | os.PathLike, file_prefix: str | None = None, **wishes: Any) -> Compressed:
        """Compress into `save_dir`; `wishes` are the arguments of `hf_lowbit.compress`, whose result is returned.

        Raises ValueError for a `file_prefix`, since from_pretrained looks for files of fixed names.
        """
        if file_prefix is not None:
            raise ValueError(
                f"`file_prefix`={file_prefix!r}: from_pretrained needs files of fixed names; leave it None."
            )
        return compress(self.model_or_path, save_dir, **wishes)
