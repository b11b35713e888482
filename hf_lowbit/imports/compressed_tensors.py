"""The "pack-quantized" format of compressed-tensors, as llm-compressor writes it.

    weight_packed      int32 [N, ceil(K b / 32)]   u along K
    weight_scale       float [N, G], [N, 1] or [1]
    weight_zero_point  int32 [ceil(N b / 32), G], v packed along N; int8 [N, G], v - 2^(b-1), in older files
    weight_shape       int   [2]                   N, K

A layer's scheme is that of the group in `config_groups` whose `targets` name it, match it ("re:..."), or name its
class, in this order.

Source: compressed_tensors/compressors/pack_quantized and utils/match.py of compressed-tensors 0.20, read and tested
against.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from ..functional.grid import group_count
from .layer import WIDTHS, Layer, check_scales, whole_group
from .words import unpack_words, word_count


METHOD = "compressed-tensors"
PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
MAIN = "weight_packed"
FORMAT = "pack-quantized"
STRATEGIES = ("group", "channel", "tensor")
# what a checkpoint may say of one linear layer's class
CLASSES = ("Linear", "Conv1D")


class Reader:
    """Reads the layers of a checkpoint whose `quantization_config` is `config`. Raises ValueError for what is not
    weights alone in integers."""

    def __init__(self, config: dict):
        self.groups = list((config.get("config_groups") or {}).values())
        formats = {group.get("format") or config.get("format") for group in self.groups}
        if formats - {FORMAT}:
            raise ValueError(
                f"`format`={sorted(map(str, formats - {FORMAT}))[0]!r} of the checkpoint can't be imported; only "
                f"{FORMAT!r} can."
            )
        for field in ("sparsity_config", "transform_config", "kv_cache_scheme"):
            value = config.get(field)
            if value and not (isinstance(value, dict) and value.get("format") == "dense"):
                raise ValueError(f"the checkpoint has a `{field}`, which low-bit layers have no place for.")

    def read(self, name: str, part: Callable[[str], Tensor | None], rows: int, in_features: int) -> Layer:
        """The layer `name` of `rows` outputs and `in_features` inputs; `part(suffix)` gives its tensors."""
        scheme = self._scheme(name)
        bits, group_size = scheme["num_bits"], None
        if scheme.get("strategy") == "group":
            group_size = whole_group(scheme.get("group_size"), in_features)
        words, scale, shape = part("weight_packed"), part("weight_scale"), part("weight_shape")
        if scale is None:
            raise ValueError(f"`{name}` lacks `weight_scale`: the checkpoint is damaged.")
        if shape is not None and shape.tolist() != [rows, in_features]:
            raise ValueError(
                f"`{name}.weight_shape` is {shape.tolist()}, the model's weight is {[rows, in_features]}."
            )
        if tuple(words.shape) != (rows, word_count(in_features, bits)):
            raise ValueError(
                f"`{name}.weight_packed` is {list(words.shape)}, which does not hold {rows} x {in_features} codes of "
                f"{bits} bits."
            )
        _check_order(name, part("weight_g_idx"), group_size, in_features)
        count = group_count(in_features, group_size)
        scale = scale.reshape(1, 1).expand(rows, 1) if scale.numel() == 1 else scale
        check_scales(name, scale, rows, in_features, group_size)
        codes = _signed(unpack_words(words, bits, in_features), bits)
        zero = part("weight_zero_point")
        if zero is None:
            zero_point = torch.zeros(rows, count, dtype=torch.int8)
        elif zero.dtype == torch.int32:
            zero_point = _signed(unpack_words(zero.t(), bits, rows).t(), bits)
        else:
            zero_point = zero.to(torch.int8).expand(rows, count)
        return Layer(name, bits, group_size, codes, scale, zero_point)

    def _scheme(self, name: str) -> dict:
        """The weights' scheme of a layer; raises ValueError when it has none, or one that can't be held."""
        for rank in (_names, _matches, _is_class):
            group = next((g for g in self.groups if any(rank(t, name) for t in g.get("targets") or ())), None)
            if group is not None:
                break
        else:
            raise ValueError(f"`{name}` is packed, but no group of `config_groups` has it among its `targets`.")
        if group.get("input_activations") or group.get("output_activations"):
            raise ValueError(
                f"`{name}` has quantized activations, with scales unlike ours; only weight-only checkpoints can be "
                "imported."
            )
        scheme = group.get("weights") or {}
        bits, strategy = scheme.get("num_bits"), scheme.get("strategy")
        if scheme.get("type", "int") != "int" or bits not in WIDTHS or strategy not in STRATEGIES:
            raise ValueError(
                f"`{name}` has weights of `num_bits`={bits!r}, `type`={scheme.get('type')!r}, "
                f"`strategy`={strategy!r}; integers of {list(WIDTHS)} bits with a strategy of {list(STRATEGIES)} can "
                "be imported."
            )
        return scheme


def _signed(fields: Tensor, bits: int) -> Tensor:
    return (fields.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def _check_order(name: str, g_idx: Tensor | None, group_size: int | None, in_features: int) -> None:
    # -1 stands for no order
    if g_idx is None or group_size is None or bool((g_idx == -1).all()):
        return
    if not torch.equal(g_idx.to(torch.int64), torch.arange(in_features) // group_size):
        raise ValueError(
            f"`{name}`: its groups follow an order of channels (`actorder`='group'), not runs of channels. Load it "
            "with its own package, dequantize, and compress the result; or quantize with `actorder='weight'`."
        )


def _names(target: str, name: str) -> bool:
    return target == name


def _matches(target: str, name: str) -> bool:
    return target.startswith("re:") and re.match(target.removeprefix("re:"), name) is not None


def _is_class(target: str, name: str) -> bool:
    return target in CLASSES
