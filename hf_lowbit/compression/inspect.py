"""`inspect`: what a model is made of, what each part would weigh at each bit width, and what can't be converted and
why.

Needs no weights: a model id or folder is built on the meta device from its config.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ..configs.lowbit import LowBitConfig
from ..configs.scheme import BITS, Scheme
from ..nn.packed import LowBitModule, PackedWeight
from ..nn.targets import Target, decide
from .table import megabytes, render_table


@dataclass
class ModuleFacts:
    """One module with weights of its own.

    `bytes_at` is the size of its weight at each bit width (scales included, biases not), empty when no low-bit layer
    exists for it. `convertible` is False when it stays dense by default; `reason` says why.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    dense_bytes: int
    convertible: bool
    reason: str
    bytes_at: dict[str, int] = field(default_factory=dict)


@dataclass
class Inspection:
    """What `inspect` found; `print` shows the table. Totals count every parameter once, tied ones too."""

    model: str
    modules: list[ModuleFacts]
    total_parameters: int
    convertible_parameters: int
    dense_bytes: int
    bytes_at: dict[str, int]
    group_size: int | str | None

    def to_dict(self) -> dict:
        """Plain JSON."""
        return asdict(self)

    def __str__(self) -> str:
        header = ["module", "kind", "shape", "parameters", "dense", *(_label(bits) for bits in BITS), "note"]
        rows = [
            [m.name, m.kind, "x".join(map(str, m.shape)), f"{m.parameters:,}", megabytes(m.dense_bytes),
             *(megabytes(m.bytes_at[str(b)]) if m.bytes_at else "-" for b in BITS),
             "" if m.convertible else m.reason]
            for m in self.modules
        ]  # fmt: skip
        share = 100 * self.convertible_parameters / max(self.total_parameters, 1)
        total = ["whole model", "", "", f"{self.total_parameters:,}", megabytes(self.dense_bytes),
                 *(megabytes(self.bytes_at[str(b)]) for b in BITS), f"{share:.1f} % convertible"]  # fmt: skip
        note = f"sizes in MB, group_size={self.group_size}; the whole model at a width keeps its dense rest as it is"
        return f"{self.model}\n{render_table(header, [*rows, total])}\n{note}"


def inspect(model_or_id: nn.Module | str | os.PathLike, group_size: int | str | None = 128) -> Inspection:
    """List a model's modules with shapes, parameters, bytes at each bit width, and what can't be converted and why.

    Args:
        model_or_id: a model, or the id or folder of one (only its config is read; no weights are loaded).
        group_size: group size of the sizes shown (default 128); None or "tensor" as in `LowBitConfig`.

    Raises:
        OSError: when there is no such model. TypeError: for anything that is neither a model nor a name.
    """
    model, title = on_meta(model_or_id)
    by_parameter = {target.parameter_name: target for target in decide(model, LowBitConfig(group_size=group_size))}
    facts, seen = [], {}
    for module_name, module in model.named_modules():
        for parameter, tensor in module.named_parameters(recurse=False):
            if id(tensor) in seen:
                continue
            seen[id(tensor)] = True
            full = f"{module_name}.{parameter}" if module_name else parameter
            facts.append(_facts(full, module, tensor, by_parameter.get(full), group_size))
    facts = [fact for fact in facts if fact is not None]
    dense_bytes = sum(fact.dense_bytes for fact in facts)
    bytes_at = {
        str(b): sum(f.bytes_at[str(b)] if f.convertible and f.bytes_at else f.dense_bytes for f in facts) for b in BITS
    }
    return Inspection(
        title, facts, sum(f.parameters for f in facts), sum(f.parameters for f in facts if f.convertible),
        dense_bytes, bytes_at, group_size,
    )  # fmt: skip


def _facts(full, module, tensor, target: Target | None, group_size) -> ModuleFacts | None:
    owner, _, parameter = full.rpartition(".")
    if isinstance(module, LowBitModule):
        if parameter in module.companions():
            return None
        if parameter in module.lowbit:
            packed = module.lowbit[parameter]
            name, kind = full if packed.experts else owner, type(module).__name__
            reason = f"already low-bit ({packed.scheme.bits})"
            return ModuleFacts(name, kind, packed.shape, packed.parameters, packed.bytes(), False, reason)
    size = tensor.numel() * tensor.element_size()
    if target is None:
        kind = type(module).__name__
        return ModuleFacts(full, kind, tuple(tensor.shape), tensor.numel(), size, False, f"no low-bit form in {kind}")
    sizes = {
        str(bits): PackedWeight(Scheme(bits, group_size), tuple(tensor.shape), target.transposed).bytes()
        for bits in BITS
    }
    return ModuleFacts(target.name, target.kind, tuple(tensor.shape), tensor.numel(), size, target.packed is not None,
                       target.reason, sizes)  # fmt: skip


def on_meta(model_or_id) -> tuple[nn.Module, str]:
    """A model as it is, or one without weights from the config of an id or folder; and what to call it."""
    if isinstance(model_or_id, nn.Module):
        return model_or_id, type(model_or_id).__name__
    if not isinstance(model_or_id, (str, os.PathLike)):
        raise TypeError(f"`model_or_id` must be a model, a model id or a folder, got {type(model_or_id).__name__}.")
    looks_local = os.path.isabs(model_or_id) or str(model_or_id).startswith((".", "~"))
    if looks_local and not os.path.isdir(model_or_id):
        raise FileNotFoundError(f"`{model_or_id}` is no folder; pass a checkpoint's folder, a Hub id or a model.")
    cls, config = class_of(model_or_id)
    return meta_model(cls, config), str(model_or_id)


def meta_model(cls: type, config: PretrainedConfig) -> nn.Module:
    """A model of class `cls` without weights."""
    with torch.device("meta"):
        return cls._from_config(config) if issubclass_pretrained(cls) else cls.from_config(config)


def class_of(name: str | os.PathLike) -> tuple[type, PretrainedConfig]:
    """The model class that a dense checkpoint names (`AutoModel` where it names none), and its config.

    Raises ValueError for one that is quantized, or made of code that comes with it.
    """
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"`{name}` comes with code of its own, which is not run from here: load it with from_pretrained(..., "
            "trust_remote_code=True) and pass the model."
        ) from None
    if hasattr(config, "quantization_config"):
        raise ValueError(
            f"`{name}` is already quantized; load it with from_pretrained and print hf_lowbit.report(model)."
        )
    return named_class(config), config


def named_class(config: PretrainedConfig) -> type:
    """The model class that a config names, `AutoModel` where it names none that transformers has."""
    known = [n for n in (getattr(config, "architectures", None) or []) if hasattr(transformers, n)]
    return getattr(transformers, known[0]) if known else transformers.AutoModel


def issubclass_pretrained(cls) -> bool:
    """Is `cls` a model class (and not an Auto class)?"""
    return isinstance(cls, type) and issubclass(cls, PreTrainedModel)


def _label(bits: str | int) -> str:
    return bits if isinstance(bits, str) else f"{bits} bits"
