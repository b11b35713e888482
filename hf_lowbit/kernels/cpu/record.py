"""The tiers of the C library, and the record that tells it about a weight."""

from __future__ import annotations

import torch

from ...functional.grid import grid_of
from ...functional.packing import row_bytes
from . import library


# name of a kernel -> its number in C, its rank, the processor features it needs
TIERS = {
    "cpu-amx": (4, 350, library.AMX),
    "cpu-avx512vnni": (3, 300, library.AVX512),
    "cpu-avxvnni": (2, 250, library.AVX2 | library.AVX_VNNI),
    "cpu-avx2": (1, 200, library.AVX2),
    # below the kernels of torch: a processor without a vector tier is better served by them at many rows
    "cpu-portable": (0, 50, 0),
}
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def refuse_tier(name: str) -> str | None:
    """Why nothing runs on the tier `name`, or None."""
    loaded = library.load()
    if loaded.handle is None:
        return loaded.reason
    if loaded.features & TIERS[name][2] != TIERS[name][2]:
        return "the processor lacks the instructions"
    return None


def record_of(
    bits: str | int,
    group_size: int,
    per_tensor: bool,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    out_features: int,
    in_features: int,
    int8_activations: bool = False,
) -> library.ProblemRecord:
    """`struct lowbit_problem` for a packed weight; `group_size` 0 means no groups, `dtype` is that of x and y."""
    grid = grid_of(bits)
    grouped = 0 < group_size < in_features
    group = group_size if grouped else in_features
    groups = -(-in_features // group)
    return library.ProblemRecord(
        field=grid.field_bits,
        offset=-grid.qmin,
        group=group,
        groups=groups,
        scale_stride=0 if per_tensor else groups,
        scale_type=TYPES[scale_dtype],
        grouped=grouped,
        int8=int8_activations,
        type=TYPES[dtype],
        rows=out_features,
        columns=in_features,
        row_bytes=row_bytes(in_features, grid),
    )
