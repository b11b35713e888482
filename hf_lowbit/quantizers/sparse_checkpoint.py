"""Checking a block-sparse checkpoint: its config and files before anything is allocated, its indices after."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from ..configs.blast import BlastConfig, BlockLayout
from ..nn.block_sparse import BlockWeight, block_tensors
from ..nn.sparse_targets import KINDS
from ..nn.sparsify import sparse_modules
from ..nn.targets import Target, candidates
from .checkpoint import _headers, _raise, _spellings


# safetensors' names of the dtypes of stored blocks
BLOCK_DTYPES = {torch.int8: "I8", torch.int32: "I32", torch.bfloat16: "BF16"}


def recorded_layouts(model: nn.Module, config: BlastConfig) -> list[tuple[Target, BlockLayout]]:
    """The layers that a checkpoint's config lists, found in the model. Raises ValueError where they do not fit."""
    by_name = {candidate.name: candidate for candidate in candidates(model) if candidate.kind in KINDS}
    same_class = type(model).__name__ in (getattr(model.config, "architectures", None) or [])
    found, problems = [], []
    for name, layout in config.layouts.items():
        target = next((by_name[n] for n in _spellings(name, model) if n in by_name), None)
        if target is None:
            if same_class:
                problems.append(f"`{name}` is listed as block-sparse, but {type(model).__name__} has no such layer")
        elif tuple(target.shape) != layout.shape or target.transposed != layout.transposed:
            problems.append(f"`{name}` is listed with shape {layout.shape}, but the model's is {tuple(target.shape)}")
        else:
            found.append((target, layout))
    if not problems and not found:
        problems = [f"none of the {len(config.layouts)} layers it lists exists in {type(model).__name__}"]
    _raise("the checkpoint's `quantization_config` does not fit the model", problems)
    return found


def check_stored_blocks(model: nn.Module, targets: list[tuple[Target, BlockLayout]], files) -> None:
    """Compare the checkpoint's files with what the layers need. Raises ValueError with every difference."""
    stored: dict[str, tuple] = {}
    for file in files or []:
        if not Path(file).exists():
            raise ValueError(f"`{file}` is missing, though the checkpoint's index names it; fetch it again.")
        stored |= _headers(str(file))
    problems = []
    for target, layout in targets if stored else ():
        if layout.form == "codes":
            # listed among the low-bit layers too, and checked with them
            continue
        dense = {"": (layout.shape, None)}
        for suffix, (shape, dtype) in (block_tensors(layout) if layout.form == "blocks" else dense).items():
            name = target.parameter_name + suffix
            found = next((stored[n] for n in _spellings(name, model) if n in stored), None)
            if found is None:
                problems.append(f"`{name}` is missing")
            elif found[0] != shape or (dtype is not None and found[1] not in (BLOCK_DTYPES[dtype], str(dtype))):
                problems.append(f"`{name}` is {found[1]} {found[0]}, expected {dtype or 'floats'} {shape}")
    _raise("the checkpoint's tensors do not fit its config", problems)


def check_blocks(model: nn.Module) -> None:
    """Raise ValueError when indices of blocks are out of range or do not ascend within a row, or scales are none."""
    problems = []
    for name, module in sparse_modules(model):
        if not isinstance(module, BlockWeight) or module.held("_col_indices").device.type == "meta":
            continue
        scale = module.held("_scale")
        if scale is not None and not bool((torch.isfinite(scale) & (scale > 0)).all()):
            problems.append(f"`{name}` has a scale that is not a positive number")
        columns, pointers = module.held("_col_indices"), module.held("_row_pointers")
        *rows, width = module.layout.mask_shape
        if bool(((columns < 0) | (columns >= width)).any()):
            problems.append(f"`{name}` has block columns outside [0, {width})")
            continue
        if pointers is not None:
            ends = int(pointers[0]) == 0 and int(pointers[-1]) == columns.numel()
            if not ends or bool((pointers.diff() < 0).any()):
                problems.append(f"`{name}` has row pointers that do not ascend from 0 to {columns.numel()}")
                continue
            row = torch.arange(math.prod(rows), device=columns.device).repeat_interleave(pointers.diff().long())
            columns = (row * width + columns.long()).view(1, -1)
        if bool((columns.diff(dim=-1) <= 0).any()):
            problems.append(f"`{name}` has block columns that do not ascend within a row")
    _raise("the checkpoint holds damaged numbers", problems)
