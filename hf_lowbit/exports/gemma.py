"""transformers' own packed layers, made for Gemma and loaded for any model: `quant_method` "gemma".

    linear      weight [N, R] uint8 (2 and 4 bits) or int8, weight_scale float32 [N, 1]
    embedding   embedding_quantized [V, R], embedding_scale float32 [V, 1]

Bytes hold u = q + 2^(b-1), least significant bits first: our own packing at 2 and 4 bits. The reader multiplies codes
and scales in the dtype of the activations, so a float32 model is exact, and in bfloat16 the scales are rounded.
`input_activation_scale` and `output_activation_scale` of 0 say that activations are not quantized; they must be in the
file, since the reader does not initialize them.

The reader replaces every linear layer that `modules_to_not_convert` does not name, by prefix, suffix and as a regular
expression: where that would catch a packed layer too, the export is refused.

Source: transformers/integrations/gemma_quant.py (5.16 to 5.24).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from ..functional.grid import TERNARY, grid_of
from ..functional.packing import pack
from .folder import save_folder
from .source import Source, Weight, dense_class_of, is_packed


FIELD_BITS = {TERNARY: 2, 2: 2, 4: 4, 8: 8}


def check(source: Source, activations: str | None) -> None:
    """Raise ValueError for what the format can't hold."""
    source.refuse(lambda weight: _obstacles(weight, activations), "gemma")
    not_converted(source, "gemma", (nn.Linear, nn.Embedding) if _has_embeddings(source) else nn.Linear)


def write(source: Source, folder: Path, max_shard_size: int | str) -> tuple[dict[str, str], dict[str, str]]:
    """Write the folder; how each module is stored, and which are rounded."""
    tensors, stored, rounded = source.dense_tensors(), {}, {}
    for weight in source.weights:
        bits, scale = FIELD_BITS[weight.scheme.bits], weight.scale()
        tensors |= _tensors(weight, bits, scale)
        stored[weight.name] = f"int{bits}"
        if not torch.equal(scale.to(source.dtype).to(torch.float32), scale):
            name = str(source.dtype).removeprefix("torch.")
            rounded[weight.name] = f"the reader rounds scales to {name}; load with dtype=torch.float32 for all digits"
    most = Counter(FIELD_BITS[weight.scheme.bits] for weight in source.weights).most_common(1)[0][0]
    patterns = {}
    for bits in sorted(set(FIELD_BITS.values()) - {most}):
        names = [re.escape(w.name) for w in source.weights if FIELD_BITS[w.scheme.bits] == bits]
        if names:
            patterns[f"^(?:{'|'.join(names)})$"] = {"num_bits": bits}
    kinds = (nn.Linear, nn.Embedding) if _has_embeddings(source) else nn.Linear
    config = {
        "quant_method": "gemma",
        "num_bits": most,
        "quantize_embeddings": _has_embeddings(source),
        "module_quant_configs": patterns,
        "modules_to_not_convert": not_converted(source, "gemma", kinds),
    }
    # a packed table and a packed head have tensors of different names there, and can't be one
    tied = any(weight.kind == "embedding" for weight in source.weights)
    save_folder(source, folder, tensors, config, max_shard_size, {"tie_word_embeddings": False} if tied else None)
    return stored, rounded


def not_converted(source: Source, format: str, kinds: type | tuple[type, ...]) -> list[str]:
    """Names of the layers of `kinds` that the reader must leave dense. Raises ValueError where the reader's way of
    matching names would leave a packed layer dense too."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    dense = [n for n, m in source.model.named_modules() if isinstance(m, kinds) and not is_packed(m)]
    kept_in_float = list(source.model._keep_in_fp32_modules or [])
    for weight in source.weights:
        if not should_convert_module(weight.name, dense + kept_in_float):
            raise ValueError(
                f"`format`={format!r} can't hold this model: its reader matches names by prefix and suffix, and "
                f"would leave `{weight.name}` dense because of a dense layer; convert or keep both alike."
            )
    return dense


def _has_embeddings(source: Source) -> bool:
    return any(weight.kind == "embedding" for weight in source.weights)


def _tensors(weight: Weight, bits: int, scale: Tensor) -> dict[str, Tensor]:
    packed = pack(weight.codes(), grid_of(bits))
    packed = packed if bits == 8 else packed.view(torch.uint8)
    if weight.kind == "embedding":
        # a tied head has the same scales, and of tensors that share memory only one would be written
        return {f"{weight.name}.embedding_quantized": packed, f"{weight.name}.embedding_scale": scale.clone()}
    off = {f"{weight.name}.{side}_activation_scale": torch.zeros(()) for side in ("input", "output")}
    return {f"{weight.name}.weight": packed, f"{weight.name}.weight_scale": scale, **off}


def _obstacles(weight: Weight, activations: str | None) -> Iterable[str]:
    scheme = weight.scheme
    if weight.kind not in ("linear", "embedding"):
        yield f"a {weight.kind} is neither a linear layer nor an embedding; keep it dense"
    elif weight.kind == "embedding" and dense_class_of(weight) is not nn.Embedding:
        yield f"{dense_class_of(weight).__name__} is not a plain embedding; keep it dense"
    if scheme.bits == 3:
        yield "3 bits are not there; quantize with `bits` 2 or 4"
    if scheme.block is not None:
        yield "it has one scale an output channel; quantize with `group_size=None`"
    if not scheme.symmetric:
        yield "it has no zero points; quantize with `symmetric=True`"
    if scheme.activations == "int8" and activations is None:
        yield (
            "activations are quantized there with one fixed scale, not per token; pass `activations='float'` to "
            "export the same weights for float activations"
        )
