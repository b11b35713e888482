"""The fields of `BlastConfig`, checked one by one: each check returns what is kept, or raises a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .lowbit import LowBitConfig


TARGETS = ("mlp", "attention", "all")
SMALLEST_BLOCK, LARGEST_BLOCK = 8, 128
SPARSE_FIELDS = ("sparsity", "block_size", "targets", "balance", "dense_layers", "overrides", "bits", "rest")
# written only where it is not the default, so that a config from before it existed is the same config
LATER_FIELDS = {"share_gate_up_mask": False, "activations": None}


def check_sparsity(value: Any, field: str = "sparsity") -> float:
    """`value` as a float. Raises unless it is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{field}`={value!r} must be a number in [0, 1).")
    if not 0 <= value < 1:
        raise ValueError(f"`{field}`={value!r} is not in [0, 1); 0.9 removes nine blocks of ten.")
    return float(value)


def check_block_size(value: Any, field: str = "block_size") -> tuple[int, int]:
    """`value` as (rows, columns). Raises unless both are integers from 8 to 128."""
    pair = (value, value) if isinstance(value, int) else value
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise TypeError(f"`{field}`={value!r} must be an integer or (rows, columns).")
    for size in pair:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"`{field}`={value!r} must hold integers.")
        if not SMALLEST_BLOCK <= size <= LARGEST_BLOCK:
            raise ValueError(f"`{field}`={value!r} must be from {SMALLEST_BLOCK} to {LARGEST_BLOCK}.")
    return tuple(pair)


def read_rest(rest: Any) -> LowBitConfig | None:
    if rest is None:
        return None
    if isinstance(rest, Mapping):
        rest = LowBitConfig.from_dict(dict(rest))
    if not isinstance(rest, LowBitConfig):
        raise TypeError(f"`rest` must be a LowBitConfig or a dict of its fields, got {type(rest).__name__}.")
    if rest.sparse is not None or rest.dequantize:
        raise ValueError(
            "`rest` says how the layers that are not sparse are rounded (a LowBitConfig) or trained (a DQTConfig), "
            "and nothing else."
        )
    if rest.is_planned or rest.method != "rtn":
        raise ValueError(
            "`rest` is rounded when training has ended, without data: give it whole `bits` (or `modules`), no "
            '`budget` and `method`="rtn".'
        )
    return rest


def read_targets(targets: Any) -> str | list[str]:
    if isinstance(targets, str):
        if targets not in TARGETS:
            raise ValueError(
                f"`targets`={targets!r} is not supported; use one of {list(TARGETS)}, or a list of names."
            )
        return targets
    if not isinstance(targets, (list, tuple)) or not targets or not all(isinstance(t, str) and t for t in targets):
        raise TypeError(f"`targets`={targets!r} must be one of {list(TARGETS)}, or a list of names or 're:' patterns.")
    return list(targets)


def read_dense_layers(value: Any) -> list[int] | dict[str, int]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        if not set(value) <= {"first", "last"} or not all(type(n) is int and n >= 0 for n in value.values()):
            raise ValueError(f'`dense_layers`={value!r} must have the keys "first" and "last" with numbers of layers.')
        return dict(value)
    if not isinstance(value, (list, tuple)) or not all(type(n) is int for n in value):
        raise TypeError(f'`dense_layers`={value!r} must be a list of layer numbers or {{"first": n, "last": n}}.')
    return list(value)


def read_overrides(overrides: Any) -> dict[str, dict]:
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise TypeError(f"`overrides`={overrides!r} must be a dict of names or 're:' patterns.")
    read: dict[str, dict] = {}
    for name, fields in overrides.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"`overrides` has the key {name!r}; keys must be names or 're:' patterns.")
        if not isinstance(fields, Mapping) or not set(fields) <= {"sparsity", "block_size"}:
            raise ValueError(f"`overrides[{name!r}]`={fields!r} may hold `sparsity` and `block_size` only.")
        read[name] = {}
        if "sparsity" in fields:
            read[name]["sparsity"] = check_sparsity(fields["sparsity"], f"overrides[{name!r}].sparsity")
        if "block_size" in fields:
            read[name]["block_size"] = list(check_block_size(fields["block_size"], f"overrides[{name!r}].block_size"))
    return read


def read_section(section: Any) -> Mapping:
    if not isinstance(section, Mapping) or section.get("method") != "blast":
        raise ValueError(f"`sparse`={section!r} is not known to this hf_lowbit; upgrade hf_lowbit.")
    missing = sorted({*SPARSE_FIELDS, "modules"} - set(section))
    unknown = sorted(set(section) - {"method", "modules", *SPARSE_FIELDS, *LATER_FIELDS})
    if missing or unknown:
        raise ValueError(f"`sparse` of the saved config lacks {missing} and has unknown {unknown}.")
    return {**LATER_FIELDS, **section}
