"""GPTQ checkpoints, as AutoGPTQ, GPTQModel and AutoRound write them.

    qweight  int32 [K b / 32, N]    u, packed along K
    qzeros   int32 [G, N b / 32]    v packed along N: v - 1 in "gptq" (v1), v in "gptq_v2"
    scales   float [G, N]
    g_idx    int32 [K]              the group of each input channel; optional

v1 readers compute (field + 1) mod 2^b, and so do we. With `desc_act` groups follow the order in which GPTQ took the
channels: g_idx jumps about, and a layer whose groups are runs of channels can't hold them. It is refused, unless one
group covers the row, or groups were kept static, when g_idx counts up as without.

Source: AutoGPTQ 0.7 and GPTQModel 2, `nn_modules/qlinear/torch.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..functional.grid import group_count
from .layer import WIDTHS, Layer, check_scales, whole_group
from .words import unpack_words


METHOD = "gptq"
PARTS = ("qweight", "qzeros", "scales", "g_idx")
MAIN = "qweight"
# checkpoint_format -> what is added to a stored zero point
OFFSETS = {"gptq": 1, "gptq_v2": 0}


class Reader:
    """Reads the layers of a checkpoint whose `quantization_config` is `config`. Raises ValueError for formats that are
    packed for one kernel, and for widths that we lack."""

    def __init__(self, config: dict):
        layout = config.get("checkpoint_format") or "gptq"
        if layout not in OFFSETS or config.get("is_marlin_format"):
            raise ValueError(
                f"`checkpoint_format`={'marlin' if layout in OFFSETS else layout!r} of the checkpoint is packed for "
                f"one kernel; only {list(OFFSETS)} can be imported. Save it as one of these."
            )
        self.offset = OFFSETS[layout]
        self.group_size = _integer(config, "group_size", -1)
        self.bits = _integer(config, "bits", None)

    def read(self, name: str, part: Callable[[str], Tensor | None], rows: int, in_features: int) -> Layer:
        """The layer `name` of `rows` outputs and `in_features` inputs; `part(suffix)` gives its tensors."""
        words, zeros, scale = part("qweight"), part("qzeros"), part("scales")
        if zeros is None or scale is None:
            raise ValueError(f"`{name}` lacks `{'qzeros' if zeros is None else 'scales'}`: the checkpoint is damaged.")
        # single layers may have another width than the config says ("dynamic")
        bits = words.shape[0] * 32 // in_features if words.ndim == 2 and in_features else 0
        if bits not in WIDTHS or words.shape != (in_features * bits // 32, rows):
            raise ValueError(
                f"`{name}.qweight` is {list(words.shape)}, which does not hold {rows} x {in_features} codes of "
                f"{self.bits} bits; widths of {list(WIDTHS)} bits can be imported."
            )
        group_size = self._group_size(name, part("g_idx"), in_features)
        scale = scale.t()
        check_scales(name, scale, rows, in_features, group_size)
        middle, top = 1 << (bits - 1), (1 << bits) - 1
        codes = unpack_words(words.t(), bits, in_features)
        zero = unpack_words(zeros, bits, rows).t()
        zero = (zero.to(torch.int16) + self.offset) & top
        return Layer(
            name, bits, group_size, (codes.to(torch.int16) - middle).to(torch.int8), scale,
            (zero - middle).to(torch.int8),
        )  # fmt: skip

    def _group_size(self, name: str, g_idx: Tensor | None, in_features: int) -> int | None:
        if g_idx is None or g_idx.numel() == 0:
            return whole_group(self.group_size, in_features)
        first = int((g_idx == g_idx[0]).to(torch.int64).sum())
        size = whole_group(self.group_size, in_features)
        size = size if group_count(in_features, size) == int(g_idx.max()) + 1 else whole_group(first, in_features)
        expected = torch.arange(in_features) // (size or max(in_features, 1))
        if not torch.equal(g_idx.to(torch.int64), expected):
            raise ValueError(
                f"`{name}`: its groups follow GPTQ's order of channels (`desc_act` without static groups), not runs "
                "of channels. Load it with its own package, dequantize, and compress the result; or quantize with "
                "`desc_act=False` or `static_groups=True`."
            )
        return size


def _integer(config: dict, field: str, default: int | None) -> int:
    value = config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{field}`={value!r} in the checkpoint's `quantization_config` is not a whole number.")
    return value
