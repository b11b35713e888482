"""Converting layers between their forms, in place: dense, masked (being pruned), block-sparse (live blocks only)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from ..configs.blast import BlockLayout
from ..functional.block_masks import columns_of, live_mask
from .block_sparse import SUFFIXES, BlockModule, block_tensors
from .classes import dense_class, kind_of, lowbit_class
from .masked import MaskedModule
from .masked_codes import MaskedCodes, code_blocks
from .packed import install
from .trainable import TrainableModule, Training, hold_codes


SparseModule = (MaskedModule, BlockModule)


def sparse_modules(model: nn.Module) -> Iterator[tuple[str, MaskedModule | BlockModule]]:
    """(name, module) of the model's masked and block-sparse layers, each once."""
    for name, module in model.named_modules():
        if isinstance(module, SparseModule):
            yield name, module


def masked_modules(model: nn.Module) -> Iterator[tuple[str, MaskedModule]]:
    """(name, module) of the layers that are being pruned, or can be."""
    for name, module in model.named_modules():
        if isinstance(module, MaskedModule):
            yield name, module


def mask_groups(modules: Mapping[str, MaskedModule]) -> list[list[MaskedModule]]:
    """Layers that have one mask in common; most are alone."""
    groups: dict[str, list[MaskedModule]] = {}
    for name, module in modules.items():
        groups.setdefault(module.mask_group or name, []).append(module)
    return list(groups.values())


def become_masked(module: nn.Module, kind: str, layout: BlockLayout, target: float) -> None:
    """Let a dense linear layer be pruned; all its blocks live."""
    module.__class__ = lowbit_class(type(module), f"masked-{kind}", ("weight",))
    module.layout, module.target = replace(layout, form="dense"), target
    device = module._parameters["weight"].device
    module.mask = torch.ones(layout.grid, dtype=torch.bool, device="cpu" if device.type == "meta" else device)


def become_codes(
    module: MaskedModule, bits: str | int, group_size: int | str | None, training: Training, dtype: torch.dtype
) -> None:
    """Let a masked layer of floats train codes of `bits` instead; its mask stays. Gradients will have `dtype`."""
    packed, stored = code_blocks(module, bits, group_size)
    kind, dense = kind_of(module).removeprefix("masked-"), dense_class(module)
    module.__class__ = lowbit_class(dense, f"masked-codes-{kind}", ("weight",))
    module.layout = replace(module.layout, bits=bits)
    install(module, "weight", packed, stored)
    hold_codes(module, training, dtype)


def become_masked_codes(module: TrainableModule, layout: BlockLayout, target: float) -> None:
    """Let a trainable low-bit layer be pruned: of a checkpoint of training. Blocks of zeros are dead."""
    kind, dense = kind_of(module).removeprefix("trainable-"), dense_class(module)
    module.__class__ = lowbit_class(dense, f"masked-codes-{kind}", ("weight",))
    module.layout, module.target = layout, target
    settle_mask(module)


def become_empty_blocks(module: nn.Module, kind: str, layout: BlockLayout) -> None:
    """Turn a dense linear layer on the meta device into a block-sparse one, to load into."""
    dense = module._parameters["weight"]
    module.__class__ = lowbit_class(type(module), f"block-{kind}", ("weight",))
    module.layout = layout
    for suffix, (shape, dtype) in block_tensors(layout).items():
        tensor = torch.empty(shape, dtype=dtype or dense.dtype, device=dense.device)
        parameter = nn.Parameter(tensor, requires_grad=dtype is None)
        # transformers draws random numbers for what it takes to be missing; that they are there has been checked
        parameter._is_hf_initialized = True
        module._parameters["weight" + suffix] = parameter


def pack_blocks(module: MaskedModule) -> None:
    """Keep the live blocks only, in the bits that the layout says. Zeros that are dead by the mask are not stored;
    nothing else is lost of float blocks, and of codes that were trained."""
    kind, dense = kind_of(module).removeprefix("masked-").removeprefix("codes-"), dense_class(module)
    columns, pointers = columns_of(module.mask)
    weight = module._parameters["weight"]
    values, scale = module.live_tensors(columns, pointers)
    balance, live = ("row", columns.shape[1]) if pointers is None else ("none", columns.shape[0])
    layout = replace(module.layout, form="blocks", balance=balance, live=live)
    _forget(module)
    module.__class__ = lowbit_class(dense, f"block-{kind}", ("weight",))
    module.layout = layout
    stored = (values, scale, columns, pointers)
    for suffix, tensor in zip(SUFFIXES, stored, strict=True):
        if tensor is not None:
            trains = not suffix and layout.bits is None and weight.requires_grad
            module._parameters["weight" + suffix] = nn.Parameter(tensor, requires_grad=trains)


def unpack_blocks(module: BlockModule, target: float, balance: str) -> None:
    """Let a block-sparse layer (of float blocks) be pruned further; its mask stays what it is until then."""
    kind, dense, mask = kind_of(module).removeprefix("block-"), dense_class(module), module.mask
    values = module._parameters["weight"]
    weight = nn.Parameter(module.dense_weight(values.dtype), requires_grad=values.requires_grad)
    layout = module.layout
    for suffix in SUFFIXES[1:]:
        module._parameters.pop("weight" + suffix, None)
    module._parameters["weight"] = weight
    module.__class__ = lowbit_class(dense, f"masked-{kind}", ("weight",))
    live = layout.grid[1] if balance == "row" else layout.blocks
    module.layout = replace(layout, form="dense", balance=balance, live=live)
    module.target, module.mask = target, mask


def restore_dense_blocks(modules: Iterable[nn.Module], dtype: torch.dtype | None = None) -> None:
    """Turn masked and block-sparse layers back into their dense classes; dead blocks become zeros."""
    for module in list(modules):
        if not isinstance(module, SparseModule):
            continue
        dense, old = dense_class(module), module._parameters["weight"]
        own = old.dtype if old.is_floating_point() else torch.get_default_dtype()
        weight = nn.Parameter(
            module.dense_weight(dtype or own), requires_grad=old.requires_grad or module.layout.bits is not None
        )
        for suffix in SUFFIXES[1:]:
            module._parameters.pop("weight" + suffix, None)
        module._parameters["weight"] = weight
        _forget(module)
        module.__dict__.pop("layout", None)
        module.__class__ = dense


def settle_mask(module: MaskedModule) -> None:
    """Take the mask from the numbers: after loading, and when they were replaced behind the mask's back."""
    module.mask = live_mask(module.oriented(), module.layout.block)


def clear_module(module: MaskedModule) -> None:
    """Zero the dead blocks, in place."""
    module.clear()


def current_layout(module: MaskedModule | BlockModule) -> BlockLayout:
    """What is stored now. A masked layer is stored dense (as numbers or as codes), with its number of live blocks in
    all."""
    if isinstance(module, BlockModule):
        return module.layout
    form = "codes" if isinstance(module, MaskedCodes) else "dense"
    return replace(module.layout, form=form, balance="none", live=int(module.mask.sum()))


def _forget(module: MaskedModule) -> None:
    for key in ("mask", "mask_group", "target", "controlled", "sparse_compute", "wants_dense_gradient",
                "dense_gradient", "collects_inputs", "input_squares", "_columns", "lowbit", "training_form",
                "_form"):  # fmt: skip
        module.__dict__.pop(key, None)
    for suffix in ("_scale", "_zero_point"):
        module._parameters.pop("weight" + suffix, None)
