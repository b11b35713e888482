"""`method="gptq"`: what from_pretrained and `quantize` do alike, calling the engine in `compression`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..compression.calibrate import make_batches
from ..configs.lowbit import LowBitConfig


def calibration_batches(model: nn.Module, config: LowBitConfig) -> list[dict[str, Tensor]] | None:
    """The batches of `config.calibration` for `model`; None for methods without data.

    Text is read by the tokenizer beside the model (`name_or_path`). Raises ValueError when there is no data, or when
    it can't be used.
    """
    if config.method == "rtn":
        return None
    if config.calibration is None:
        raise ValueError(
            f'`method`="{config.method}" needs `calibration`: texts, a text file, a Dataset or token tensors; '
            '`method`="rtn" rounds without data.'
        )
    # from_pretrained builds the model with meta as the default device
    with torch.device("cpu"):
        return make_batches(config.calibration, tokenizer_of(model), model)


def tokenizer_of(model: nn.Module) -> Any:
    """The tokenizer beside a model, found by its `name_or_path`; None where there is none."""
    name = getattr(model, "name_or_path", None) or getattr(getattr(model, "config", None), "_name_or_path", None)
    if not name:
        return None
    from transformers import AutoTokenizer

    # never the question whether to run code; a model made of such code shows that its user trusts it
    trusted = type(model).__module__.startswith("transformers_modules")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trusted)
    except (OSError, ValueError, KeyError):
        # models of images or sound have none; text without one is refused in a sentence
        return None


def convert_calibrated(model: nn.Module, targets: list, batches: list[dict[str, Tensor]]) -> None:
    """Convert `targets` in place and leave a record of each on the model, as `model.lowbit_records`."""
    from ..compression.layer_stage import quantize_layers

    model.lowbit_records = quantize_layers(model, targets, batches)
