"""What a card states, measured: from a report of the model in memory, or from the files of a checkpoint.

Both ways end in the same `Facts`. The files suffice because the format records them: `config.json` lists each
converted module with its scheme and logical shape, and the header of a safetensors file gives the bytes of every
tensor, so no weight is read. What the files do not hold is why a module stayed dense.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..configs.lowbit import QUANT_METHOD, LowBitConfig


# a converted tensor is stored as codes under its own name and these beside it (docs/format.md)
COMPANIONS = ("_scale", "_zero_point")
# and these beside live blocks
BLOCK_COMPANIONS = ("_scale", "_col_indices", "_row_pointers")
NOT_RECORDED = "not converted"


@dataclass
class Blocks:
    """What weights in blocks have in common: the measured share of dead blocks, the bits of the live ones."""

    block: tuple[int, int]
    bits: str | int | None
    sparsity: float


@dataclass
class Group:
    """Weights that share a scheme, or blocks, or a reason to stay dense."""

    scheme: Mapping | None
    reason: str
    count: int = 0
    parameters: int = 0
    bytes: int = 0
    names: set[str] = field(default_factory=set)
    blocks: Blocks | None = None

    def add(self, name: str, parameters: int, bytes: int) -> None:
        self.count += 1
        self.parameters += parameters
        self.bytes += bytes
        # layers that differ in their number only are one name
        self.names.add(re.sub(r"(?<![^.])\d+(?![^.])", "*", name))


@dataclass
class Facts:
    """The numbers of a card; the largest groups come first."""

    architecture: str
    config: Mapping[str, Any]
    groups: list[Group]

    @property
    def lowbit(self) -> list[Group]:
        return [group for group in self.groups if group.scheme is not None]

    @property
    def sparse(self) -> list[Group]:
        return [group for group in self.groups if group.blocks is not None]

    @property
    def dense(self) -> list[Group]:
        dense = [group for group in self.groups if group.scheme is None and group.blocks is None]
        return [group for group in dense if group.parameters]

    @property
    def parameters(self) -> int:
        return sum(group.parameters for group in self.groups)

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups)

    @property
    def lowbit_parameters(self) -> int:
        return sum(group.parameters for group in self.lowbit)

    @property
    def bits_per_weight(self) -> float:
        """Of the converted weights, scales and zero points included."""
        return 8 * sum(group.bytes for group in self.lowbit) / max(self.lowbit_parameters, 1)

    @property
    def bits(self) -> list[int | str]:
        """The widths that occur."""
        return sorted({group.scheme["bits"] for group in self.lowbit}, key=str)


def from_report(report: Any, architecture: str, config: Mapping[str, Any]) -> Facts:
    """Facts from `hf_lowbit.report(model)`, or from its `to_dict()`."""
    entries = report["modules"] if isinstance(report, Mapping) else report.modules
    rows = []
    for entry in entries:
        values = entry if isinstance(entry, Mapping) else vars(entry)
        scheme = values["scheme"]
        if scheme is not None and not isinstance(scheme, Mapping):
            scheme = scheme.to_dict()
        blocks = None
        if values.get("block") is not None:
            blocks = Blocks(tuple(values["block"]), values["block_bits"], round(values["sparsity"], 4))
        rows.append((values["name"], scheme, values["reason"], values["parameters"], values["bytes"], blocks))
    return Facts(architecture, config, _grouped(rows))


def from_checkpoint(folder: str | Path) -> Facts:
    """Facts from a folder that `save_pretrained` wrote."""
    folder = Path(folder)
    config = read_json(folder / "config.json")
    stored = config.get("quantization_config")
    if not isinstance(stored, dict) or stored.get("quant_method") != QUANT_METHOD:
        raise ValueError(
            f"`{folder.name}` is not a low-bit checkpoint: its config.json has no `quantization_config` of "
            f"{QUANT_METHOD!r}. Compress the model first, then save it with save_pretrained."
        )
    quantization = LowBitConfig.from_dict(stored)
    sizes, rows = tensor_sizes(folder), []
    for name, layout in getattr(quantization, "layouts", {}).items():
        # experts are listed by their parameter, everything else by the module that owns `weight`
        held = name if layout.experts else f"{name}.weight"
        if held not in sizes:
            raise ValueError(f"config.json lists `{name}` as block-sparse, but no safetensors file holds it.")
        size = sum(sizes.pop(held + suffix, (0, 0))[1] for suffix in ("", *BLOCK_COMPANIONS))
        blocks = Blocks(layout.block, layout.bits if layout.form == "blocks" else None, round(layout.sparsity, 4))
        rows.append((held, None, "", layout.parameters, size, blocks))
    converted = quantization if quantization.sparse is None else quantization.rest or LowBitConfig()
    stored_names = set(sizes)
    for name, shape in converted.shapes.items():
        # experts are listed by their parameter, everything else by the module that owns `weight`
        codes = name if name in sizes else f"{name}.weight"
        if codes not in sizes:
            if _is_tied_table(config, shape, converted.shapes, stored_names):
                continue
            raise ValueError(f"config.json lists `{name}` as converted, but no safetensors file holds it.")
        size = sum(sizes.pop(codes + suffix, (0, 0))[1] for suffix in ("", *COMPANIONS))
        rows.append((codes, converted.modules[name].to_dict(), "", math.prod(shape), size, None))
    rows += [(name, None, NOT_RECORDED, parameters, size, None) for name, (parameters, size) in sizes.items()]
    return Facts((config.get("architectures") or ["unknown"])[0], quantization.to_dict(), _grouped(rows))


def _is_tied_table(config: dict, shape: tuple[int, ...], shapes: Mapping, stored: set[str]) -> bool:
    """Whether a weight of `shape` is stored under the name of the table it is tied to: an output layer's is."""
    sizes = {config.get("vocab_size"), (config.get("text_config") or {}).get("vocab_size")}
    return shape[0] in sizes and any(other == shape and f"{name}.weight" in stored for name, other in shapes.items())


def tensor_sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """{tensor: (elements, bytes)} of a checkpoint, from the headers of its safetensors files."""
    index = folder / "model.safetensors.index.json"
    # as transformers reads: a single file beside the index of an earlier, sharded save is the newer one
    single = (folder / "model.safetensors").is_file() or not index.is_file()
    names = ["model.safetensors"] if single else sorted(set(read_json(index)["weight_map"].values()))
    sizes = {}
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise FileNotFoundError(f"`{folder.name}` lacks the weights file {name!r}; save the checkpoint again.")
        for tensor, entry in _header(folder / name).items():
            if tensor != "__metadata__":
                begin, end = entry["data_offsets"]
                sizes[tensor] = math.prod(entry["shape"]), end - begin
    return sizes


def read_json(path: Path) -> dict:
    """A JSON object from a file; an error names the file."""
    if not path.is_file():
        raise FileNotFoundError(f"`{path.parent.name}` has no {path.name}; pass a folder that save_pretrained wrote.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} of `{path.parent.name}` is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} of `{path.parent.name}` holds a {type(value).__name__}, not an object.")
    return value


def _header(path: Path) -> dict:
    # 8 bytes little-endian: length of the JSON header that follows
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size - 8:
            raise ValueError(f"{path.name} is truncated or not a safetensors file; save the checkpoint again.")
        return json.loads(file.read(length))


def _grouped(rows: Iterable[tuple[str, Mapping | None, str, int, int, Blocks | None]]) -> list[Group]:
    groups: dict[tuple, Group] = {}
    for name, scheme, reason, parameters, size, blocks in rows:
        # why a kernel was chosen depends on the machine; the card keeps only why something stayed dense
        reason = reason if scheme is None and blocks is None else ""
        key = tuple(scheme.values()) if scheme is not None else (reason, blocks and tuple(vars(blocks).values()))
        group = groups.setdefault(key, Group(scheme, reason, blocks=blocks))
        group.add(name, parameters, size)
    return sorted(groups.values(), key=lambda group: -group.parameters)
