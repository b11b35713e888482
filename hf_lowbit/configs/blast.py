"""`BlastConfig`: weights of linear layers become block-sparse by training (BLaST: Okanovic et al. 2025).

The config says what will be sparse: which layers, in which blocks, how much of each. When and how blocks are removed
and grown is `BlastCallback`'s. It reads and writes the same kind of checkpoint as `LowBitConfig` (one `quant_method`);
a section `sparse` in the saved config lists each layer with its dense shape and what of it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .blast_fields import (
    LATER_FIELDS,
    SPARSE_FIELDS,
    check_block_size,
    check_sparsity,
    read_dense_layers,
    read_overrides,
    read_rest,
    read_section,
    read_targets,
)
from .block_layout import ACTIVATIONS, BALANCES, BLOCK_BITS, BlockLayout
from .lowbit import LowBitConfig


# one-shot pruning of more than this ruins a model: 5 % of blocks of 64 x 64 doubles the perplexity of SmolLM2-135M
ONE_SHOT_LIMIT = 0.02


def kept_blocks(sparsity: float, blocks: int) -> int:
    """How many of `blocks` are kept at `sparsity`, to the nearest, halves up; never less than one."""
    return max(1, math.floor((1 - sparsity) * blocks + 0.5 + 1e-9))


class BlastConfig(LowBitConfig):
    """Quantization config for block-sparse training, for `from_pretrained` and `hf_lowbit.quantize`.

    The model stays dense until `Trainer(callbacks=[hf_lowbit.BlastCallback()])` has pruned it block by block; then its
    layers hold live blocks only, and so does the file.

    Args:
        sparsity: share of blocks of each weight that are removed in the end, in [0, 1); default 0.9. With
            `balance="row"` each block row keeps the nearest whole number of blocks, at least one.
        block_size: 8 to 128; an int for square blocks (default 32), or (rows, columns) of the dense weight [N, K].
            Blocks need not divide a weight; those at the edge are then padded with zeros.
        targets: "mlp" (default): the linear layers of decoder and encoder blocks that are not attention; "attention";
            "all": both; or a list of names and "re:patterns". Fused experts are among the MLPs: each expert's weight
            is a matrix with a mask of its own.
        bits: None (default) keeps live blocks float; 8, 4 or "ternary" stores them low-bit, with a scale for each row
            of each block: rounded to nearest when training has ended (at the end of `BlastCallback`, or by
            `hf_lowbit.freeze`), or trained as codes from the start where `rest` is a `DQTConfig`.
        activations: "float", or "int8": each token is rounded to 8 bits for its product with low-bit blocks, which
            is faster from about eight tokens on; needs `bits`. None (default) is "float".
        rest: None (default) leaves the layers that are not sparse float. A `LowBitConfig` (or a dict of its fields)
            rounds them when training has ended. A `DQTConfig` trains their codes directly, and those of the live
            blocks with them unless `bits` is None: pass `DQTCallback` to the Trainer beside `BlastCallback`. Of its
            fields the blocks take `group_size` (None: they start with the scale of their row; a number: with one of
            their own), `scale` and `grad_dtype`.
        modules_to_not_convert: names or "re:patterns" to leave dense, in addition to what is always left dense.
        balance: "row" (default; ours): the same number of live blocks in every block row; "none": the best blocks
            of the whole weight, as the paper has it.
        dense_layers: layers to leave dense: numbers (negative ones count from the end), or {"first": n, "last": n};
            default none.
        overrides: {name or "re:pattern": {"sparsity": ..., "block_size": ...}} for single layers.
        share_gate_up_mask: True gives the gate and up projections of a gated MLP one mask, by the sum of their scores:
            half the indices, and one pass over the input for both; default False. They must have equal blocks and
            targets.
        one_shot: prune at once, by the norm of blocks, without training. Refused above a sparsity of 0.02: it ruins
            models.
        dequantize: turn a sparse checkpoint back into dense weights while loading.

    Raises:
        TypeError, ValueError: with the field, its value and the allowed ones.
        NotImplementedError: for what is announced but not available yet.
    """

    fields = ("sparsity", "block_size", "targets", "bits", "rest", "modules_to_not_convert", "balance",
              "dense_layers", "overrides", "share_gate_up_mask", "one_shot", "dequantize", "activations")  # fmt: skip

    def __init__(
        self,
        sparsity: float = 0.9,
        block_size: int | tuple[int, int] = 32,
        targets: str | list[str] = "mlp",
        bits: str | int | None = None,
        rest: Any = None,
        modules_to_not_convert: list[str] | None = None,
        balance: str = "row",
        dense_layers: list[int] | Mapping[str, int] | None = None,
        overrides: Mapping[str, Mapping] | None = None,
        share_gate_up_mask: bool = False,
        one_shot: bool = False,
        dequantize: bool = False,
        activations: str | None = None,
        **kwargs,
    ):
        # what `to_dict` writes beside the arguments: the bookkeeping of a saved config
        saved = kwargs.pop("sparse", None)
        self.layouts: dict[str, BlockLayout] = {}
        if saved is not None:
            section = read_section(saved)
            sparsity, block_size, targets, balance = (section[f] for f in SPARSE_FIELDS[:4])
            dense_layers, overrides, bits, rest = (section[f] for f in SPARSE_FIELDS[4:])
            share_gate_up_mask, activations = section["share_gate_up_mask"], section["activations"]
            self.layouts = {name: _read_layout(name, layout) for name, layout in section["modules"].items()}
            for field in ("bits", "group_size", "symmetric", "activations", "method", "modules"):
                kwargs.pop(field, None)
        if isinstance(bits, (bool, float)) or bits not in BLOCK_BITS:
            raise ValueError(f"`bits`={bits!r} is not supported for live blocks; use one of {list(BLOCK_BITS)}.")
        if activations not in (None, *ACTIVATIONS):
            raise ValueError(f"`activations`={activations!r} is not supported; use one of {list(ACTIVATIONS)}.")
        if activations == "int8" and bits is None:
            raise ValueError(
                "`activations`='int8' needs low-bit live blocks: set `bits` to 8, 4 or \"ternary\" too. Activations "
                "of layers that are not sparse are a matter of `rest`."
            )
        super().__init__(modules_to_not_convert=modules_to_not_convert, dequantize=dequantize, **kwargs)
        self.bits, self.activations, self.rest = bits, activations, read_rest(rest)
        self.sparsity = check_sparsity(sparsity)
        self.block_size = check_block_size(block_size)
        self.targets = read_targets(targets)
        if balance not in BALANCES:
            raise ValueError(f"`balance`={balance!r} is not supported; use one of {list(BALANCES)}.")
        self.balance = balance
        self.dense_layers = read_dense_layers(dense_layers)
        self.overrides = read_overrides(overrides)
        for field, value in (("one_shot", one_shot), ("share_gate_up_mask", share_gate_up_mask)):
            if value is not True and value is not False:
                raise TypeError(f"`{field}`={value!r} must be True or False.")
        self.share_gate_up_mask = share_gate_up_mask
        highest = max([self.sparsity, *(o.get("sparsity", 0.0) for o in self.overrides.values())])
        if one_shot and highest > ONE_SHOT_LIMIT:
            raise ValueError(
                f"`one_shot`=True with `sparsity`={highest}: removing blocks without training ruins a model (5 % of "
                f"64 x 64 blocks doubles the perplexity of a 135M one). Above {ONE_SHOT_LIMIT}, leave `one_shot` "
                "False and train with `Trainer(callbacks=[hf_lowbit.BlastCallback()])`."
            )
        self.one_shot = one_shot

    @property
    def is_resolved(self) -> bool:
        return bool(self.layouts)

    @property
    def sparse(self) -> dict[str, Any]:
        """The section of the saved config that makes it one of a sparse model."""
        section = {field: getattr(self, field) for field in SPARSE_FIELDS}
        section["block_size"] = list(self.block_size)
        section["overrides"] = {name: dict(fields) for name, fields in self.overrides.items()}
        section["rest"] = None if self.rest is None else self.rest.to_dict()
        section |= {f: getattr(self, f) for f, default in LATER_FIELDS.items() if getattr(self, f) != default}
        return {"method": "blast", **section, "modules": {n: layout.to_dict() for n, layout in self.layouts.items()}}

    def to_dict(self) -> dict[str, Any]:
        kept = ("quant_method", "format_version", "modules_to_not_convert", "dequantize")
        return {**{k: v for k, v in super().to_dict().items() if k in kept}, "sparse": self.sparse}

    def get_loading_attributes(self) -> dict[str, Any]:
        attributes = super().get_loading_attributes()
        attributes["requested"]["sparse"] = self.sparse
        return attributes

    def conflict(self) -> str | None:
        requested = getattr(self, "requested", None)
        if requested is None or self.dequantize:
            return None
        asked = requested["sparse"]
        for name, layout in self.layouts.items():
            if layout.form == "codes":
                return (
                    f"the checkpoint is of a training of the codes of `{name}`, which goes on as it was begun. Load "
                    "it without `quantization_config`, or dense with BlastConfig(dequantize=True)."
                )
            if layout.bits is not None and layout.form == "blocks":
                return (
                    f"the checkpoint holds the live blocks of `{name}` in `bits`={layout.bits!r}, and blocks of codes "
                    "can't be pruned further. Load it without `quantization_config`, or dense with "
                    "BlastConfig(dequantize=True)."
                )
            if list(layout.block) != asked["block_size"] and not asked["overrides"]:
                return (
                    f"the checkpoint holds `{name}` in blocks of {layout.block}, but `quantization_config` asks for "
                    f"`block_size`={tuple(asked['block_size'])}. Load it with the blocks it has, or dense with "
                    "BlastConfig(dequantize=True)."
                )
        return None


# as `DQTConfig` does: one kind of checkpoint, and transformers compares names
BlastConfig.__name__ = LowBitConfig.__name__


def _read_layout(name: str, layout: Any) -> BlockLayout:
    try:
        return layout if isinstance(layout, BlockLayout) else BlockLayout(**layout)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`sparse.modules[{name!r}]`: {error}") from None
