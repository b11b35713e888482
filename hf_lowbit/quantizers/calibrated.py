"""What needs the dense model as a whole, GPTQ and plans: what from_pretrained and `quantize` do alike, calling the
engine in `compression`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..compression.calibrate import make_batches
from ..configs.lowbit import LowBitConfig
from ..nn.swap import check_finite, convert
from ..nn.targets import Target, find_targets


def needs_dense(config: LowBitConfig) -> bool:
    """Whether weights can't be rounded one by one as they are read."""
    return config.is_planned or config.method != "rtn"


def calibration_batches(model: nn.Module, config: LowBitConfig) -> list[dict[str, Tensor]] | None:
    """The batches of `config.calibration` for `model`; None where none is needed and none is given.

    Text is read by the tokenizer beside the model (`name_or_path`). Raises ValueError when there is no data, or when
    it can't be used.
    """
    if not needs_dense(config) or (config.method == "rtn" and config.calibration is None):
        return None
    if config.calibration is None:
        raise ValueError(
            f'`method`="{config.method}" needs `calibration`: texts, a text file, a Dataset or token tensors; '
            '`method`="rtn" rounds without data.'
        )
    # from_pretrained builds the model with meta as the default device
    with torch.device("cpu"):
        return make_batches(config.calibration, tokenizer_of(model), model)


def check_plan(model: nn.Module, config: LowBitConfig) -> None:
    """Raise ValueError where the size that is to be planned is impossible; needs no weights."""
    if config.is_planned:
        from ..compression.plan import find_frame

        find_frame(model, config)


def convert_dense(
    model: nn.Module, config: LowBitConfig, batches: list[dict[str, Tensor]] | None
) -> tuple[LowBitConfig, list[Target]]:
    """Convert a dense model in place by `config`: plan first where a size is asked for, then round with or without
    data. Returns the config without plan and data, and what was converted. Records of rounding with data stay on the
    model, as `model.lowbit_records`.

    Raises ValueError, before anything is changed, for weights with NaN or infinity and for a size that nothing fits.
    """
    if config.is_planned:
        from ..compression.plan import plan

        config = plan(model, config, batches)
    config.calibration = None
    targets = [target for target in find_targets(model, config) if target.packed is not None]
    if config.method == "rtn":
        convert(targets)
    else:
        from ..compression.layer_stage import quantize_layers

        check_finite(targets)
        with nullcontext() if config.spool is None else config.spool.releasing(model):
            model.lowbit_records = quantize_layers(model, targets, batches, journal=config.journal)
        if config.spool is not None:
            config.spool.settle(model)
    return config, targets


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
