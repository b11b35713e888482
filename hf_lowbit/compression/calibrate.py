"""Calibration data, as a list of batches: keyword arguments of the model's forward.

    list of strings, text file      joined with the end-of-text token between, cut into rows of `length` tokens
    datasets.Dataset, rows of it    its column `text`, `input_ids` or `messages`
    list of chats                   lists of {"role", "content"}, through the tokenizer's chat template, then as texts
    token tensors, arrays, lists    [T] or [B, T], taken as they are
    dicts                           inputs of the model (images, audio features, encoder and decoder ids), as they are;
                                    ids and masks may lack the batch dimension

Rows are full, so that no padding is needed; where dicts bring an `attention_mask`, statistics leave padding out. An
encoder-decoder gets its source as target too (with the labels' shift) when no decoder inputs are given; where the
source is sound, its decoder gets the first token alone.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


LENGTH = 512
# rows taken when nothing is said: 8 x 512 tokens
ROWS = 8
# fewer tokens say nothing about a layer's inputs
LEAST_TOKENS = 32


def make_batches(
    data: Any, tokenizer: Any = None, model: nn.Module | None = None, length: int = LENGTH, rows: int = ROWS,
    seed: int = 0,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """Turn calibration data of any kind above into batches of one row each.

    Args:
        data: see the module. tokenizer: needed for text; on an instance of a Hub model its tokenizer is loaded by the
            caller. model: to know its vocabulary and whether it has a decoder. length: tokens a row. rows: rows to
            take from text; drawn with `seed` among all that the text has, in order.

    Raises:
        TypeError, ValueError: when the data is of no known kind, empty, too short, or has ids outside the vocabulary.
    """
    if isinstance(data, (str, os.PathLike)):
        data = [_read(data)]
    if isinstance(data, (Tensor, np.ndarray)):
        return _checked([{"input_ids": row[None]} for row in _rows_of(torch.as_tensor(data))], model)
    column = getattr(data, "column_names", None)
    if isinstance(column, Mapping):
        raise TypeError(f"`calibration` is a {type(data).__name__} of the splits {list(column)}; pass one of them.")
    if isinstance(data, Mapping):
        data = [data]
    if column is not None:
        name = _column_of(column)
        if name is None:
            raise ValueError(
                f"`calibration` has the columns {list(column)}; name one `text`, `input_ids` or `messages`."
            )
        data = [row[name] for row in data]
    elif not isinstance(data, Iterable):
        raise TypeError(
            f"`calibration` is a {type(data).__name__}; pass texts, a text file, a Dataset, token tensors, chats or "
            "dicts of model inputs."
        )
    data = list(data)
    if not data:
        raise ValueError("`calibration` is empty; a few thousand tokens of text like the model's own are enough.")
    if isinstance(data[0], Mapping) and _column_of(data[0]) in ("messages", "text"):
        # rows of a dataset, one by one
        data = [row[_column_of(data[0])] for row in data]
    first = data[0]
    if isinstance(first, Mapping) and not {"role", "content"} <= set(first):
        return _checked([_with_batch({k: _tensor(v) for k, v in row.items()}) for row in data], model)
    ids = isinstance(first, (list, tuple)) and first and isinstance(first[0], int)
    if isinstance(first, (Tensor, np.ndarray)) or ids:
        return _checked([{"input_ids": row[None]} for item in data for row in _rows_of(_tensor(item))], model)
    if isinstance(first, Mapping):
        data, first = [data], data
    if tokenizer is None:
        raise ValueError("`calibration` is text, but the model has no tokenizer beside it; pass token tensors.")
    if isinstance(first, (list, tuple)):
        odd = next((turn for chat in data for turn in chat if not isinstance(turn, Mapping)), None)
        if odd is not None:
            raise TypeError(
                f"`calibration` holds lists of {type(odd).__name__}; pass a flat list of texts, or chats (lists of "
                '{"role", "content"}).'
            )
        data = [tokenizer.apply_chat_template(list(chat), tokenize=False) for chat in data]
    if not all(isinstance(text, str) for text in data):
        wrong = next(type(text).__name__ for text in data if not isinstance(text, str))
        raise TypeError(f"`calibration` mixes texts with {wrong}; all items must be of one kind.")
    return _checked(_packed(data, tokenizer, length, rows, seed), model)


def _packed(texts: list[str], tokenizer: Any, length: int, rows: int, seed: int) -> list[dict[str, Tensor]]:
    ids: list[int] = []
    for text in texts:
        if ids and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < LEAST_TOKENS:
        raise ValueError(
            f"`calibration` has {len(ids)} tokens; at least {LEAST_TOKENS} are needed, and some thousands are better."
        )
    whole = len(ids) // length
    if whole == 0:
        return [{"input_ids": torch.tensor(ids)[None]}]
    table = torch.tensor(ids[: whole * length]).view(whole, length)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(whole, generator=generator)[:rows].sort().values
    return [{"input_ids": row[None]} for row in table[chosen]]


def _column_of(names: Iterable[str]) -> str | None:
    """The column that holds what the model reads: tokens before chats before text."""
    return next((name for name in ("input_ids", "messages", "text") if name in names), None)


def _read(path: str | os.PathLike) -> str:
    # no file system has longer names, and most refuse to be asked
    shown = str(path) if len(str(path)) <= 80 else f"{str(path)[:80]}..."
    if len(os.fsencode(path)) > 4096 or not os.path.isfile(path):
        raise FileNotFoundError(f"`calibration`={shown!r} is no text file; pass texts as a list of strings.")
    return Path(path).read_text(encoding="utf-8")


def _tensor(value: Any) -> Any:
    return value if isinstance(value, Tensor) or isinstance(value, (bool, str)) else torch.as_tensor(value)


def _with_batch(row: dict[str, Any]) -> dict[str, Any]:
    """Ids and masks as [1, T] where a row of a dataset has [T]."""
    ids = row.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 1:
        return row
    alone = {key for key, value in row.items() if isinstance(value, Tensor) and value.shape[:1] == ids.shape}
    return {key: value[None] if key in alone else value for key, value in row.items()}


def _rows_of(ids: Tensor) -> Tensor:
    if ids.numel() == 0:
        raise ValueError(f"`calibration` holds no tokens: a tensor of shape {tuple(ids.shape)}.")
    if ids.ndim not in (1, 2) or ids.is_floating_point():
        raise ValueError(
            f"`calibration` holds a tensor {ids.dtype} of shape {tuple(ids.shape)}; token ids are whole numbers, [T] "
            "or [B, T]. Pass other inputs as dicts of the model's arguments."
        )
    return ids.reshape(-1, ids.shape[-1]).long()


def _checked(batches: list[dict[str, Tensor]], model: nn.Module | None) -> list[dict[str, Tensor]]:
    tokens = sum(b["input_ids"].numel() for b in batches if "input_ids" in b)
    if "input_ids" in batches[0] and tokens < LEAST_TOKENS:
        raise ValueError(f"`calibration` has {tokens} tokens; at least {LEAST_TOKENS} are needed.")
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None)
    if model is not None:
        _check_arguments(batches, model)
    for batch in batches:
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and ids.numel() and int(ids.min()) < 0:
            raise ValueError(
                f"`calibration` has the token id {int(ids.min())}; ids are not negative. Labels may be, padding is "
                "said by `attention_mask`."
            )
        if ids is not None and vocabulary and ids.numel() and int(ids.max()) >= vocabulary:
            raise ValueError(
                f"`calibration` has the token id {int(ids.max())}, but the model's vocabulary has {vocabulary}: it "
                "was made with another tokenizer."
            )
        decoder = [k for k in batch if k.startswith("decoder_") or k == "labels"]
        if getattr(config, "is_encoder_decoder", False) and not decoder:
            start = getattr(config, "decoder_start_token_id", None) or 0
            # sound has no tokens to repeat: its decoder begins, and no more
            rows = next((len(v) for v in batch.values() if isinstance(v, Tensor) and v.ndim), 1)
            first = torch.full((rows, 1), start)
            batch["decoder_input_ids"] = first if ids is None else torch.cat([first.to(ids), ids[:, :-1]], dim=1)
    return batches


def _check_arguments(batches: list[dict[str, Any]], model: nn.Module) -> None:
    """Raises ValueError for names that the model's forward does not have, and where there is nothing but labels."""
    parameters = inspect.signature(model.forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for batch in batches:
        unknown = [name for name in batch if name not in parameters]
        inputs = [name for name in batch if name not in unknown and not name.endswith(("labels", "mask"))]
        if (unknown and not open_ended) or not inputs:
            names = [name for name in parameters if name not in ("args", "kwargs")][:8]
            raise ValueError(
                f"`calibration` has dicts of {sorted(batch)}, but {type(model).__name__} takes {names}: "
                "pass its inputs by these names."
            )
