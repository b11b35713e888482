"""Dense weights that wait on disk: each is written to a file as it is read, and stands in the model as a map of it.

A mapped weight is a tensor like any other, but its numbers are read when they are used, and `release` gives their
memory back. So a dense model can run block by block without being held.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from ..compression.chains import find_chains


class Spool:
    """The files, in a folder of their own inside of `folder` (default: that for temporary files); `close` removes
    them."""

    def __init__(self, folder: str | os.PathLike | None = None):
        self._folder = tempfile.TemporaryDirectory(prefix=".hf_lowbit-", dir=folder, ignore_cleanup_errors=True)
        self._maps: dict[str, mmap.mmap] = {}
        self.bytes = 0

    def __deepcopy__(self, memo):
        # configs are copied, the files are one
        return self

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Write `tensor` and return the map of it, in `dtype`. Raises OSError when the disk is full."""
        tensor = tensor.detach().to("cpu", dtype).contiguous()
        if tensor.numel() == 0:
            return tensor
        path = Path(self._folder.name) / str(len(self._maps))
        with path.open("wb") as file:
            file.write(tensor.flatten().view(torch.uint8).numpy())
        with path.open("rb") as file:
            # private and writable in name only: torch warns about buffers that can't be written
            self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.bytes += path.stat().st_size
        if os.name == "posix":
            # the map keeps the file alive, and a process that is killed leaves nothing behind
            path.unlink()
        return torch.frombuffer(self._maps[name], dtype=dtype, count=math.prod(tensor.shape)).view(tensor.shape)

    def settle(self, model: nn.Module) -> None:
        """Read into memory, as ordinary parameters, what of `model` is still a map."""
        for name, parameter in list(model.named_parameters()):
            if name in self._maps and parameter.is_floating_point():
                parameter.data = parameter.data.clone()
                parameter.requires_grad_()

    def release(self, prefix: str = "") -> None:
        """Give back the memory of the weights whose names start with `prefix`; they are read again when used."""
        for name, mapped in self._maps.items():
            if name.startswith(prefix) and hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Forget the files; maps that are still in use stay valid."""
        self._maps.clear()
        self._folder.cleanup()

    @contextmanager
    def releasing(self, model: nn.Module) -> Iterator[None]:
        """Give back the memory of each repeated block when it has run."""

        def hook(name):
            return lambda module, args, output: self.release(f"{name}.")

        blocks = [entry for chain in find_chains(model) for entry in chain.blocks]
        handles = [block.register_forward_hook(hook(name)) for name, block in blocks]
        self.release()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class SpoolOp(ConversionOps):
    """transformers' load operation that spools the tensors of one parameter as they arrive."""

    def __init__(self, spool: Spool, dtypes: dict[str, torch.dtype]):
        self.spool, self.dtypes = spool, dtypes

    def convert(self, input_dict, full_layer_name=None, **kwargs):
        stored = {}
        for name, value in input_dict.items():
            name = name if name in self.dtypes else full_layer_name
            value = value[0] if isinstance(value, list) else value
            mapped = self.spool.put(name, value, self.dtypes[name])
            stored[name] = nn.Parameter(mapped, requires_grad=False)
        return stored
