"""transformers' own BitNet layers (`quant_method` "bitnet", `BitLinear`): ternary weights, int8 activations per token.

    weight        uint8 [N / 4, K]; byte (r, k) holds rows r, r + N/4, r + N/2, r + 3N/4, each as q + 1 in two bits
    weight_scale  [1], 1 / s in the model's dtype: the reader divides by it

Weights are exact in codes; the reader computes in the model's dtype and rounds 1 / s to it, and its activation scale
has a floor of 1e-5, so products are close to ours, not equal. Its first forward pass compiles (torch.compile, which
needs a C++ compiler), and it needs accelerate.

Source: transformers/integrations/bitnet.py (5.24); BitNet b1.58, Ma et al. 2024.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from ..functional.grid import TERNARY
from .folder import save_folder
from .gemma import not_converted
from .source import Source, Weight


ROUNDED = "the reader multiplies in the model's dtype with 1 / scale rounded to it"


def check(source: Source, activations: str | None) -> None:
    """Raise ValueError for what the format can't hold."""
    source.refuse(_obstacles, "bitnet")
    if activations == "float":
        raise ValueError("`activations`='float': BitNet layers always quantize theirs; leave it out.")
    not_converted(source, "bitnet", nn.Linear)


def write(source: Source, folder: Path, max_shard_size: int | str) -> tuple[dict[str, str], dict[str, str]]:
    """Write the folder; how each module is stored, and which are rounded (all)."""
    tensors = source.dense_tensors()
    for weight in source.weights:
        tensors[f"{weight.name}.weight"] = pack_rows(weight.codes())
        tensors[f"{weight.name}.weight_scale"] = (1.0 / weight.scale()[0, :1]).to(source.dtype)
    config = {
        "quant_method": "bitnet",
        "linear_class": "bitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": not_converted(source, "bitnet", nn.Linear),
    }
    save_folder(source, folder, tensors, config, max_shard_size)
    names = [weight.name for weight in source.weights]
    return dict.fromkeys(names, "ternary"), dict.fromkeys(names, ROUNDED)


def pack_rows(codes: Tensor) -> Tensor:
    """Ternary int8 [N, K] to uint8 [N / 4, K]; 4 divides N."""
    quarters = (codes + 1).view(torch.uint8).unflatten(0, (4, -1))
    packed = quarters[0].clone()
    for position in range(1, 4):
        packed |= quarters[position] << (2 * position)
    return packed


def _obstacles(weight: Weight) -> Iterable[str]:
    scheme, remedy = weight.scheme, 'quantize with `bits="ternary", group_size="tensor"`'
    if weight.kind != "linear":
        yield f"a {weight.kind} is not a linear layer; keep it dense with `modules_to_not_convert`"
    if scheme.bits != TERNARY:
        yield f"it holds ternary weights only; {remedy}, or export as compressed-tensors"
    elif scheme.group_size != "tensor":
        yield f"it has one scale a tensor; {remedy}, or export as compressed-tensors"
    if scheme.activations != "int8":
        yield 'its activations are int8 always; quantize with `activations="int8"`, or export as gemma'
    if weight.packed.out_features % 4:
        yield f"four rows share a byte, and 4 does not divide its {weight.packed.out_features} outputs; keep it dense"
