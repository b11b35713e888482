"""Rows of a packed weight as numbers by the C library (csrc/rows.h), bit for bit those of the definition."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...functional.rows import RowKernel, Rows, register_rows
from . import library
from .record import TIERS, TYPES, record_of, refuse_tier


_ID_BYTES = {torch.int64: 8, torch.int32: 4, None: 0}
_descriptions: dict[Rows, library.ProblemRecord] = {}
MOST_DESCRIPTIONS = 4096


def refuse(name: str, rows: Rows) -> str | None:
    """Why the tier `name` can't serve, or None."""
    if rows.device != "cpu":
        return f"the tensors are on {rows.device}"
    if rows.dtype not in TYPES or rows.scale_dtype not in TYPES:
        return f"no code for {rows.dtype} numbers with {rows.scale_dtype} scales"
    if rows.ids_dtype not in _ID_BYTES:
        return f"no code for {rows.ids_dtype} ids"
    if rows.in_features == 0:
        return "rows are empty"
    return refuse_tier(name)


def _run(
    tier: int, weight: Tensor, scale: Tensor, zero_point: Tensor | None, ids: Tensor | None, rows: Rows
) -> Tensor:
    record = _descriptions.get(rows)
    if record is None:
        if len(_descriptions) >= MOST_DESCRIPTIONS:
            _descriptions.clear()
        record = _descriptions[rows] = record_of(
            rows.bits,
            rows.group_size,
            rows.per_tensor,
            rows.scale_dtype,
            rows.dtype,
            rows.out_features,
            rows.in_features,
        )
    if weight.shape[1] != record.row_bytes:
        raise ValueError(
            f"Expected {record.row_bytes} bytes a row for {rows.in_features} codes of {rows.bits} bits. "
            f"Got {weight.shape[1]}."
        )
    # named, so that a copy outlives the call
    weight, scale = weight.contiguous(), scale.contiguous()
    zero_point = None if zero_point is None else zero_point.contiguous()
    ids = None if ids is None else ids.contiguous()
    count = rows.out_features if ids is None else ids.shape[0]
    y = torch.empty(count, rows.in_features, dtype=rows.dtype)
    status = library.load().rows(
        library.address_of(record),
        tier,
        torch.get_num_threads(),
        count,
        None if ids is None else ids.data_ptr(),
        _ID_BYTES[rows.ids_dtype],
        weight.data_ptr(),
        scale.data_ptr(),
        None if zero_point is None else zero_point.data_ptr(),
        y.data_ptr(),
    )
    if status == -3:
        low, high = int(ids.min()), int(ids.max())
        raise IndexError(f"index out of range: ids span [{low}, {high}], the table has {rows.out_features} rows.")
    if status:
        raise MemoryError(f"no memory for the scratch of {count} rows of {rows.in_features} weights.")
    return y


for _name, (_tier, _rank, _) in TIERS.items():
    # any compiled loop beats a dozen passes of torch: the plain one too ranks above the definition
    register_rows(RowKernel(_name, _rank, partial(refuse, _name), partial(_run, _tier)))
