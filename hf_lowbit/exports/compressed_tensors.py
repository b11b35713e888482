"""The "pack-quantized" format of compressed-tensors, which transformers reads with that package, and vLLM and SGLang.

    weight_packed  int32 [N, ceil(K * b / 32)]    fields u = c + 2^(b-1) of b bits, least significant first
    weight_scale   the model's dtype [N, G]
    weight_shape   int64 [2]                      N, K

The reader computes w = c * s in the dtype of the scale. c has at most 8 bits and a group's scale 8 as well, so the
product is exact in float32 and rounded once, as ours is.

Only symmetric grids are written. The format has zero points, but transformers 5.24 with compressed-tensors 0.20 can't
load packed ones (it expects their unpacked shape). c = q - z is exact on the next wider symmetric grid instead: at 2
and 3 bits 4, at 4 bits 8. Ternary is c = q in fields of 2 bits. Symmetric 3 bits are written in fields of 4 too, since
fields of 3 straddle words.

Source: compressed_tensors/compressors/pack_quantized of compressed-tensors 0.20, read and tested against.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional.grid import TERNARY, expand_groups
from .folder import save_folder
from .source import Source, Weight


# (bits, symmetric) -> bits of a field that holds every q - z
FIELD_BITS = {
    (TERNARY, True): 2,
    (2, True): 2,
    (3, True): 4,
    (4, True): 4,
    (8, True): 8,
    (2, False): 4,
    (3, False): 4,
    (4, False): 8,
}


def check(source: Source, activations: str | None) -> None:
    """Raise ValueError for what the format can't hold."""
    source.refuse(lambda weight: _obstacles(weight, activations), "compressed-tensors")


def write(source: Source, folder: Path, max_shard_size: int | str) -> tuple[dict[str, str], dict[str, str]]:
    """Write the folder; how each module is stored, and which are rounded."""
    tensors, stored, rounded = source.dense_tensors(), {}, {}
    groups: dict[tuple, list[str]] = {}
    for weight in source.weights:
        bits, scale = FIELD_BITS[weight.scheme.bits, weight.scheme.symmetric], weight.scale()
        written = scale.to(source.dtype)
        tensors[f"{weight.name}.weight_packed"] = pack_words(_centred(weight), bits)
        tensors[f"{weight.name}.weight_scale"] = written
        tensors[f"{weight.name}.weight_shape"] = torch.tensor([weight.packed.out_features, weight.packed.in_features])
        if not torch.equal(written.to(torch.float32), scale):
            rounded[weight.name] = f"scales rounded to {str(source.dtype).removeprefix('torch.')}, the model's dtype"
        groups.setdefault((bits, weight.scheme.block), []).append(weight.name)
        stored[weight.name] = f"int{bits}" + ("" if weight.scheme.symmetric else " (zero points taken into the codes)")
    save_folder(source, folder, tensors, _config(source, groups), max_shard_size)
    return stored, rounded


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """int8 codes [R, C] to int32 [R, ceil(C * bits / 32)]; `bits` divides 32."""
    per_word = 32 // bits
    fields = codes.to(torch.int64) + (1 << (bits - 1))
    fields = F.pad(fields, (0, -fields.shape[-1] % per_word)).unflatten(-1, (-1, per_word))
    words = (fields << (torch.arange(per_word, device=codes.device) * bits)).sum(-1)
    # the top bit is the sign of an int32
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _centred(weight: Weight) -> Tensor:
    """q - z, int8 [N, K]."""
    codes, zero_point = weight.codes(), weight.zero_point()
    if zero_point is None:
        return codes
    return codes - expand_groups(zero_point, weight.packed.in_features, weight.scheme.block)


def _obstacles(weight: Weight, activations: str | None) -> Iterable[str]:
    if weight.kind != "linear":
        yield f"a {weight.kind} is not a linear layer; keep it dense with `modules_to_not_convert`"
    if weight.scheme.activations == "int8" and activations is None:
        yield (
            "int8 activations have another scale there (half a step of the grid less); pass `activations='float'` to "
            "export the same weights for float activations"
        )
    if (weight.scheme.bits, weight.scheme.symmetric) not in FIELD_BITS:
        yield "8 bits with zero points need 9 without; quantize with `symmetric=True`"
    block, inputs = weight.scheme.block, weight.packed.in_features
    if block is not None and inputs % block:
        fit = [size for size in (256, 128, 96, 64, 48, 32, 16, 8) if inputs % size == 0]
        yield (
            f"groups of {block} do not divide its {inputs} inputs; quantize with `group_size` "
            + (f"one of {fit}" if fit else "None")
        )


def _config(source: Source, groups: dict[tuple, list[str]]) -> dict:
    config_groups = {}
    for number, ((bits, block), names) in enumerate(groups.items()):
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if block is None else "group",
            "group_size": block,
            "dynamic": False,
        }
        # one scheme goes by the class, as other writers of the format have it
        targets = ["Linear"] if len(groups) == 1 else names
        config_groups[f"group_{number}"] = {
            "targets": targets,
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": source.dense_linears(),
    }
