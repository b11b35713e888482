"""Registering with transformers' Auto classes; idempotent, and cheap enough for an import hook.

The hook fires as soon as `transformers.quantizers.auto` has run, while `transformers.modeling_utils` is still being
imported. The quantizer needs model classes, so until they exist its place is held by a function that makes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from ..configs.lowbit import QUANT_METHOD, LowBitConfig


# called when a quantizer is made, which is when model classes exist: what stands above this package adds to them
WHEN_USED: list[Callable[[], None]] = []


def register() -> None:
    """Make `quant_method: hf_lowbit` known to `from_pretrained`. Calling it again changes nothing."""
    # imported here: the import itself fires the hook, which must find this module complete
    from transformers.quantizers import auto

    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = LowBitConfig
    # the classes whose load-time wishes (dequantize=True) reach the config of a saved checkpoint
    if LowBitConfig not in auto.LOADING_ATTRIBUTES_CONFIG_TYPES:
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*auto.LOADING_ATTRIBUTES_CONFIG_TYPES, LowBitConfig)
    if hasattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel"):
        _register_quantizer()
    else:
        auto.AUTO_QUANTIZER_MAPPING.setdefault(QUANT_METHOD, _make_quantizer)


def _register_quantizer() -> Callable:
    from transformers.quantizers import auto

    from .sparse import quantizer_for

    auto.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = quantizer_for
    return quantizer_for


def _make_quantizer(quantization_config: LowBitConfig, **kwargs):
    return _register_quantizer()(quantization_config, **kwargs)
