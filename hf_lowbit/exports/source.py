"""What every export starts from: the packed weights of a low-bit model as codes, scales and zero points, its dense
tensors, and the parts that are saved alike in every folder.

A format asks each weight whether it can hold it; all refusals of a model are raised together, before anything is
written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from ..configs.scheme import Scheme
from ..nn.arming import trainable_modules
from ..nn.classes import dense_class, kind_of
from ..nn.packed import LowBitModule, PackedWeight
from ..quantizers.freeze import freeze


# refusals listed in one message
SHOWN = 6


@dataclass(frozen=True)
class Weight:
    """One packed weight of a model. `name` is its module's; shapes are those of storage, [N, K] and [N, G]."""

    name: str
    kind: str
    module: LowBitModule
    parameter: str
    packed: PackedWeight

    @property
    def scheme(self) -> Scheme:
        return self.packed.scheme

    def codes(self) -> Tensor:
        """int8 [N, K]."""
        return self.module.codes(self.parameter)

    def scale(self) -> Tensor:
        """float32 [N, G]; one scale for the tensor is repeated for every row."""
        return self._per_row("_scale").to(torch.float32)

    def zero_point(self) -> Tensor | None:
        """int8 [N, G], or None on symmetric grids."""
        return None if self.scheme.symmetric else self._per_row("_zero_point")

    def _per_row(self, suffix: str) -> Tensor:
        stored = self.module._parameters[self.parameter + suffix].detach()
        return stored.expand(self.packed.out_features, stored.shape[-1]).contiguous()


class Source:
    """A low-bit model that is being exported. It is read, never changed."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None):
        self.model, self.tokenizer = model, tokenizer
        self.weights = [
            Weight(name, kind_of(module), module, parameter, packed)
            for name, module in model.named_modules()
            if isinstance(module, LowBitModule)
            for parameter, packed in module.lowbit.items()
        ]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        dtype = self.model.config.dtype or self.model.dtype
        return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype

    def refuse(self, reasons: Callable[[Weight], Iterable[str]], format: str) -> None:
        """Raise ValueError with every reason that `reasons` yields for a weight, beside its module and scheme."""
        found: dict[str, list[Weight]] = {}
        for weight in self.weights:
            for reason in reasons(weight):
                found.setdefault(reason, []).append(weight)
        if not found:
            return
        parts = []
        for reason, weights in list(found.items())[:SHOWN]:
            more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
            parts.append(f"`{weights[0].name}`{more} ({weights[0].scheme}): {reason}")
        left = f" ({len(found) - SHOWN} more kinds of refusals)" if len(found) > SHOWN else ""
        raise ValueError(f"`format`={format!r} can't hold this model: {'; '.join(parts)}.{left}")

    def dense_tensors(self) -> dict[str, Tensor]:
        """Everything that is not packed, by its name in the model; a tied tensor once."""
        packed = {f"{w.name}.{w.parameter}{suffix}" for w in self.weights for suffix in w.packed.tensors()}
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        tensors, seen = {}, set()
        for name, tensor in self.model.state_dict().items():
            if name in packed:
                continue
            place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
            if place in seen or name in tied:
                continue
            seen.add(place)
            tensors[name] = tensor.detach().contiguous()
        return tensors

    def dense_linears(self) -> list[str]:
        """Names of the linear layers that are dense."""
        return [n for n, m in self.model.named_modules() if isinstance(m, nn.Linear) and not is_packed(m)]

    def save_parts(self, folder: Path) -> None:
        """Generation config and tokenizer, processor or feature extractor, where there are any."""
        if self.model.can_generate() and self.model.generation_config is not None:
            self.model.generation_config.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def is_packed(module: nn.Module) -> bool:
    return isinstance(module, LowBitModule) and bool(module.__dict__.get("lowbit"))


def open_source(model_or_dir: Any, tokenizer: Any = None) -> Source:
    """The model as a `Source`; a folder or Hub id is loaded, and frozen where it is trainable. Raises ValueError for
    what is not low-bit, still trainable, offloaded, or carries adapters."""
    if isinstance(model_or_dir, (str, os.PathLike)):
        model = freeze_copy(_load(model_or_dir))
        tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(model_or_dir)
    else:
        model = model_or_dir
    if getattr(model, "peft_config", None) or not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"`model_or_dir` is a {type(model).__name__}; pass a low-bit transformers model or its folder. Adapters "
            "are merged first: `with hf_lowbit.merge_as('requantize'): model = model.merge_and_unload()`."
        )
    if next(trainable_modules(model), None) is not None:
        raise ValueError(
            "the low-bit weights of this model are trainable; call hf_lowbit.freeze(model) first, or pass the folder "
            "of its checkpoint."
        )
    source = Source(model, tokenizer)
    if not source.weights:
        raise ValueError(
            f"{type(model).__name__} has no low-bit weights to export; compress it first, with from_pretrained(..., "
            "quantization_config=hf_lowbit.LowBitConfig(...)) or hf_lowbit.quantize(model, config)."
        )
    away = next((n for n, p in model.named_parameters() if p.device.type == "meta"), None)
    if away is not None:
        raise ValueError(f"`{away}` is offloaded; load the model without disk offload, or pass its folder.")
    source.refuse(_never, "any")
    return source


def freeze_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze a model that nobody else holds."""
    return model if next(trainable_modules(model), None) is None else freeze(model)


def _never(weight: Weight) -> Iterable[str]:
    if weight.packed.experts:
        yield (
            "no export writes fused experts; keep them dense (`modules_to_not_convert`), or export "
            "model.dequantize() with save_pretrained"
        )


def dense_class_of(weight: Weight) -> type:
    """The class that the module had before it was converted."""
    return dense_class(weight.module)


def _load(name: str | os.PathLike) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(name)
    architecture = (getattr(config, "architectures", None) or ["AutoModel"])[0]
    cls = getattr(transformers, architecture, None)
    if cls is None:
        raise ValueError(
            f"`{Path(name).name}` is a {architecture}, which transformers {transformers.__version__} does not have; "
            "load the model yourself and pass it."
        )
    return cls.from_pretrained(name, dtype="auto")


def _tokenizer_of(name: str | os.PathLike) -> Any:
    """What turns data into inputs for this checkpoint, or None where the checkpoint has nothing of the kind."""
    folder = Path(name)
    files = ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json")
    if folder.is_dir() and not any((folder / file).is_file() for file in files):
        return None
    if folder.is_dir() and not any((folder / file).is_file() for file in files[:2]):
        return transformers.AutoTokenizer.from_pretrained(name)
    return transformers.AutoProcessor.from_pretrained(name)
