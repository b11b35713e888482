"""Converting weights between their forms, in place: dense, masked (being pruned), block-sparse (live blocks only).

A weight is a layer, or a stack of fused experts: a `MaskedStack` or `BlockStack` of their module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from ..configs.blast import BlockLayout
from ..functional.block_masks import columns_of, live_mask
from .block_sparse import SUFFIXES, BlockModule, BlockWeight, block_tensors
from .classes import dense_class, kind_of, lowbit_class
from .gated import GatedBlocks, can_fuse
from .masked import MaskedModule
from .masked_codes import MaskedCodes, code_blocks
from .masked_weight import MaskedWeight
from .packed import install
from .sparse_experts import BlockStack, MaskedStack, SparseExperts
from .trainable import TrainableModule, Training, hold_codes


SparseModule = (MaskedModule, BlockModule, SparseExperts)


def weights_of(module: nn.Module) -> dict[str, MaskedWeight | BlockWeight]:
    """The block-sparse weights that `module` itself holds, by the name of the parameter."""
    if isinstance(module, SparseExperts):
        return dict(module.stacks)
    return {"weight": module} if isinstance(module, SparseModule) else {}


def sparse_modules(model: nn.Module) -> Iterator[tuple[str, MaskedWeight | BlockWeight]]:
    """(name, weight) of the model's masked and block-sparse weights, each once: layers by the name of the module,
    stacks of experts by that of the parameter."""
    for name, module in model.named_modules():
        for parameter, weight in weights_of(module).items():
            yield name if weight is module else ".".join(part for part in (name, parameter) if part), weight


def masked_modules(model: nn.Module) -> Iterator[tuple[str, MaskedWeight]]:
    """(name, weight) of those that are being pruned, or can be."""
    for name, weight in sparse_modules(model):
        if isinstance(weight, MaskedWeight):
            yield name, weight


def mask_groups(modules: Mapping[str, MaskedWeight]) -> list[list[MaskedWeight]]:
    """Weights that have one mask in common; most are alone."""
    groups: dict[str, list[MaskedWeight]] = {}
    for name, module in modules.items():
        groups.setdefault(module.mask_group or name, []).append(module)
    return list(groups.values())


def become_masked(module: nn.Module, kind: str, layout: BlockLayout, target: float, parameter: str = "weight") -> None:
    """Let a dense weight be pruned; all its blocks live."""
    layout, device = replace(layout, form="dense"), module._parameters[parameter].device
    mask = torch.ones(layout.mask_shape, dtype=torch.bool, device="cpu" if device.type == "meta" else device)
    if kind == "experts":
        _hold(module, parameter, MaskedStack(module, parameter, layout, target, mask))
        return
    module.__class__ = lowbit_class(type(module), f"masked-{kind}", ("weight",))
    module.layout, module.target, module.mask = layout, target, mask


def _hold(module: nn.Module, name: str, stack: MaskedStack | BlockStack | None) -> None:
    """Let parameter `name` of an experts module be `stack`; None: dense again."""
    dense = dense_class(module) if isinstance(module, SparseExperts) else type(module)
    stacks = {k: v for k, v in module.__dict__.get("stacks", {}).items() if k != name}
    if stack is not None:
        stacks[name] = stack
    module.__dict__.pop("stacks", None)
    if stacks:
        module.stacks = stacks
    module.__class__ = lowbit_class(dense, "sparse-experts", tuple(sorted(stacks))) if stacks else dense


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


def become_empty_blocks(module: nn.Module, kind: str, layout: BlockLayout, parameter: str = "weight") -> None:
    """Turn a dense weight on the meta device into a block-sparse one, to load into."""
    dense = module._parameters[parameter]
    if kind == "experts":
        _hold(module, parameter, BlockStack(module, parameter, layout))
    else:
        module.__class__ = lowbit_class(type(module), f"block-{kind}", ("weight",))
        module.layout = layout
    for suffix, (shape, dtype) in block_tensors(layout).items():
        tensor = torch.empty(shape, dtype=dtype or dense.dtype, device=dense.device)
        held = nn.Parameter(tensor, requires_grad=dtype is None)
        # transformers draws random numbers for what it takes to be missing; that they are there has been checked
        held._is_hf_initialized = True
        module._parameters[parameter + suffix] = held


def pack_blocks(weight: MaskedWeight) -> None:
    """Keep the live blocks only, in the bits that the layout says. Zeros that are dead by the mask are not stored;
    nothing else is lost of float blocks, and of codes that were trained."""
    columns, pointers = columns_of(weight.mask)
    values, scale = weight.live_tensors(columns, pointers)
    balance, live = ("row", columns.shape[-1]) if pointers is None else ("none", columns.shape[0])
    layout = replace(weight.layout, form="blocks", balance=balance, live=live)
    trained = weight.parameter.requires_grad
    module, name = place(weight)
    if isinstance(weight, MaskedStack):
        _hold(module, name, BlockStack(module, name, layout))
    else:
        kind = kind_of(module).removeprefix("masked-").removeprefix("codes-")
        dense = dense_class(module)
        _forget(module)
        module.__class__ = lowbit_class(dense, f"block-{kind}", ("weight",))
        module.layout = layout
    stored = (values, scale, columns, pointers)
    for suffix, tensor in zip(SUFFIXES, stored, strict=True):
        if tensor is not None:
            trains = not suffix and layout.bits is None and trained
            module._parameters[name + suffix] = nn.Parameter(tensor, requires_grad=trains)


def unpack_blocks(weight: BlockWeight, target: float, balance: str) -> None:
    """Let a block-sparse weight (of float blocks) be pruned further; its mask stays what it is until then."""
    mask, values, layout = weight.mask, weight.held(), weight.layout
    dense = nn.Parameter(weight.dense_weight(values.dtype), requires_grad=values.requires_grad)
    layout = replace(layout, form="dense", balance=balance, live=0)
    layout = replace(layout, live=layout.pool if balance == "row" else layout.blocks)
    module, name = place(weight)
    for suffix in SUFFIXES[1:]:
        module._parameters.pop(name + suffix, None)
    module._parameters[name] = dense
    if isinstance(weight, BlockStack):
        _hold(module, name, MaskedStack(module, name, layout, target, mask))
        return
    kind = kind_of(module).removeprefix("block-")
    module.__class__ = lowbit_class(dense_class(module), f"masked-{kind}", ("weight",))
    module.layout, module.target, module.mask = layout, target, mask


def restore_dense_blocks(modules: Iterable[nn.Module], dtype: torch.dtype | None = None) -> None:
    """Turn masked and block-sparse weights back into dense ones; dead blocks become zeros."""
    for owner in list(modules):
        if isinstance(owner, GatedBlocks):
            owner.__class__ = dense_class(owner)
            for key in ("gated", "_columns"):
                owner.__dict__.pop(key, None)
        for weight in weights_of(owner).values():
            module, name = place(weight)
            old = module._parameters[name]
            own = old.dtype if old.is_floating_point() else torch.get_default_dtype()
            trains = old.requires_grad or weight.layout.bits is not None
            dense = nn.Parameter(weight.dense_weight(dtype or own), requires_grad=trains)
            for suffix in SUFFIXES[1:]:
                module._parameters.pop(name + suffix, None)
            module._parameters[name] = dense
            if isinstance(module, SparseExperts):
                _hold(module, name, None)
                continue
            plain = dense_class(module)
            _forget(module)
            module.__dict__.pop("layout", None)
            module.__class__ = plain


def fuse_gated(model: nn.Module) -> None:
    """Let the MLPs whose gate and up hold float blocks with one mask compute both at once, where a kernel does."""
    for module in list(model.modules()):
        names = can_fuse(module)
        if names is not None:
            module.__class__ = lowbit_class(type(module), "gated", ())
            module.gated = names


def place(weight: MaskedWeight | BlockWeight) -> tuple[nn.Module, str]:
    """The module that holds the tensors of `weight`, and the parameter's name."""
    return (weight.owner, weight.name) if isinstance(weight, (MaskedStack, BlockStack)) else (weight, "weight")


def settle_mask(weight: MaskedWeight) -> None:
    """Take the mask from the numbers: after loading, and when they were replaced behind the mask's back."""
    weight.mask = live_mask(weight.oriented(), weight.layout.block)


def clear_module(weight: MaskedWeight) -> None:
    """Zero the dead blocks, in place."""
    weight.clear()


def current_layout(weight: MaskedWeight | BlockWeight) -> BlockLayout:
    """What is stored now. A masked weight is stored dense (as numbers or as codes), with its number of live blocks in
    all."""
    if isinstance(weight, BlockWeight):
        return weight.layout
    form = "codes" if isinstance(weight, MaskedCodes) else "dense"
    return replace(weight.layout, form=form, balance="none", live=int(weight.mask.sum()))


def _forget(module: MaskedModule) -> None:
    for key in ("mask", "mask_group", "target", "controlled", "sparse_compute", "wants_dense_gradient",
                "dense_gradient", "collects_inputs", "input_squares", "_columns", "lowbit", "training_form",
                "_form"):  # fmt: skip
        module.__dict__.pop(key, None)
    for suffix in ("_scale", "_zero_point"):
        module._parameters.pop("weight" + suffix, None)
