"""Registering with transformers' Auto classes; idempotent, and cheap enough for an import hook.

May run while `transformers.modeling_utils` is still being imported (the hook fires when `transformers.quantizers.auto` is
ready), so nothing here may need a model class.
"""

from __future__ import annotations

from transformers.quantizers import auto

from ..configs.lowbit import QUANT_METHOD, LowBitConfig
from .quantizer import LowBitQuantizer


def register() -> None:
    """Make `quant_method: hf_lowbit` known to `from_pretrained`. Calling it again changes nothing."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = LowBitConfig
    auto.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = LowBitQuantizer
    # the classes whose load-time wishes (dequantize=True) reach the config of a saved checkpoint
    if LowBitConfig not in auto.LOADING_ATTRIBUTES_CONFIG_TYPES:
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*auto.LOADING_ATTRIBUTES_CONFIG_TYPES, LowBitConfig)
