"""Which weights of a model become block-sparse, in which blocks and to which share: decided before any work starts."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace

from torch import nn

from ..configs.blast import BlastConfig, BlockLayout, kept_blocks
from .masked import MaskedModule
from .names import first_match
from .reads import directly_read
from .rules import between_modules, default_reasons, find_reason, tied_groups
from .targets import Target, candidates, obstacle


ATTENTION = re.compile(r"att(entio)?n", re.IGNORECASE)
# what mixes tokens without being attention
MIXERS = re.compile(r"mixer|mamba|ssm|rnn|conv", re.IGNORECASE)
KINDS = ("linear", "conv1d", "experts")
# last parts of the names of the two projections of a gated MLP that read the same input
GATE_AND_UP = {"gate_proj": "up_proj", "w1": "w3", "wi_0": "wi_1"}


@dataclass
class SparseTarget:
    """A weight that becomes block-sparse."""

    target: Target
    layout: BlockLayout
    sparsity: float

    @property
    def name(self) -> str:
        return self.target.name


def find_sparse_targets(model: nn.Module, config: BlastConfig) -> list[SparseTarget]:
    """Decide. Raises ValueError when nothing would be sparse, a pattern matches nothing, or blocks are larger than a
    weight."""
    default, read = default_reasons(model), directly_read(model)
    ties = between_modules(model, tied_groups(model))
    tied = {name for group in ties for name in group}
    depth = _depths(model)
    found, used, reasons = [], set(), {}
    for target in candidates(model):
        name = target.name
        skip = first_match(config.modules_to_not_convert, name)
        asked = first_match(config.targets, name) if isinstance(config.targets, list) else None
        override = first_match(config.overrides, name)
        used |= {pattern for pattern in (skip, asked, override) if pattern is not None}
        if skip is not None:
            reasons[name] = f"`modules_to_not_convert` names it ({skip!r})"
            continue
        if not (asked is not None if isinstance(config.targets, list) else _is_wanted(name, config.targets)):
            continue
        reason = obstacle(target.module, target.kind, target.parameter) or find_reason(read, target.module_name)
        reason = reason or (None if target.kind in KINDS else f"{target.kind}s have no block-sparse form")
        if reason is None and target.parameter_name in tied:
            reason = "tied weight"
        if reason is None and asked != name:
            reason = find_reason(default, target.module_name)
        if reason is None and _is_dense_layer(name, config.dense_layers, depth):
            reason = "`dense_layers` names its layer"
        if reason is not None:
            reasons[name] = reason
            continue
        found.append(_sized(target, config, config.overrides.get(override, {})))
    for field in ("modules_to_not_convert", "overrides", *(["targets"] if isinstance(config.targets, list) else [])):
        for pattern in getattr(config, field):
            if pattern not in used and not _matches_any(model, pattern, field):
                raise ValueError(f"`{field}` has {pattern!r}, which matches no layer of {type(model).__name__}.")
    kept = [t for t in found if t.sparsity > 0 and kept_blocks(t.sparsity, t.layout.pool) == t.layout.pool]
    if kept:
        warnings.warn(
            f"nothing will be removed of {len(kept)} weights, such as `{kept[0].name}`: of {kept[0].layout.pool} "
            f"blocks a {'row' if config.balance == 'row' else 'matrix'} the nearest whole number at `sparsity`="
            f"{kept[0].sparsity} is all. Use smaller blocks (`overrides` sets them for single layers).",
            stacklevel=2,
        )
    if not found:
        listed = "; ".join(f"`{name}`: {reason}" for name, reason in list(reasons.items())[:8])
        raise ValueError(
            f"nothing of {type(model).__name__} would be block-sparse with `targets`={config.targets!r}. {listed}"
        )
    return found


def share_masks(model: nn.Module, share: bool) -> None:
    """Let gate and up projections have one mask, or none in common. Raises ValueError when there are none to share,
    or they differ in blocks or target."""
    masked = {name: module for name, module in model.named_modules() if isinstance(module, MaskedModule)}
    for module in masked.values():
        module.mask_group = None
    found = False
    for name, gate in masked.items() if share else ():
        owner, _, last = name.rpartition(".")
        if last not in GATE_AND_UP or f"{owner}.{GATE_AND_UP[last]}" not in masked:
            continue
        found, up = True, masked[f"{owner}.{GATE_AND_UP[last]}"]
        if (gate.layout.grid, gate.layout.block, gate.target) != (up.layout.grid, up.layout.block, up.target):
            raise ValueError(
                f"`share_gate_up_mask`=True: `{name}` has blocks {gate.layout.block} and target {gate.target}, "
                f"`{owner}.{GATE_AND_UP[last]}` {up.layout.block} and {up.target}; make them equal in `overrides`."
            )
        gate.mask_group = up.mask_group = owner
    if share and masked and not found:
        raise ValueError(
            f"`share_gate_up_mask`=True, but {type(model).__name__} has no pair of gate and up projections among the "
            f"block-sparse layers (such as {', '.join(f'`{a}` and `{b}`' for a, b in GATE_AND_UP.items())})."
        )


def _sized(target: Target, config: BlastConfig, override: dict) -> SparseTarget:
    block = tuple(override.get("block_size", config.block_size))
    rows, columns = reversed(target.shape[-2:]) if target.transposed else target.shape[-2:]
    if block[0] > rows or block[1] > columns:
        raise ValueError(
            f"`block_size`={block} is larger than the weight [{rows}, {columns}] of `{target.name}`; use smaller "
            "blocks (`overrides` sets them for single layers) or add it to `modules_to_not_convert`."
        )
    layout = BlockLayout(target.shape, block, "dense", config.balance, 0, target.transposed, config.bits,
                         config.activations or "float")  # fmt: skip
    layout = replace(layout, live=layout.pool if config.balance == "row" else layout.blocks)
    return SparseTarget(target, layout, override.get("sparsity", config.sparsity))


def _is_wanted(name: str, targets: str) -> bool:
    """Is `name` a linear layer of a stack of blocks, and of the asked part of a block?"""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if not numbers:
        return False
    inside = ".".join(parts[numbers[0] + 1 :])
    if MIXERS.search(inside):
        return False
    attention = ATTENTION.search(inside) is not None
    return targets == "all" or attention == (targets == "attention")


def _depths(model: nn.Module) -> dict[str, int]:
    """Number of blocks in each stack, by the stack's name."""
    depths: dict[str, int] = {}
    for name, _ in model.named_modules():
        stack, _, last = name.rpartition(".")
        if last.isdigit():
            depths[stack] = max(depths.get(stack, 0), int(last) + 1)
    return depths


def _is_dense_layer(name: str, dense_layers: list[int] | dict[str, int], depths: dict[str, int]) -> bool:
    parts = name.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if index is None or not dense_layers:
        return False
    layer, depth = int(parts[index]), depths[".".join(parts[:index])]
    if isinstance(dense_layers, dict):
        return layer < dense_layers.get("first", 0) or layer >= depth - dense_layers.get("last", 0)
    return layer in dense_layers or layer - depth in dense_layers


def _matches_any(model: nn.Module, pattern: str, field: str) -> bool:
    # a module may be named dense that would not have been sparse; an override or target must mean a weight
    return field == "modules_to_not_convert" and any(first_match([pattern], n) for n, _ in model.named_modules() if n)
