"""Converting a model's modules in place, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from transformers.utils import logging

from .classes import dense_class, lowbit_class
from .linear import FlatLinear
from .packed import LowBitModule, install, quantize_weight, remove
from .targets import Target


def prepare(targets: Iterable[Target], load_packed: bool, device: torch.device | str | None = None) -> None:
    """Turn the targets' modules into low-bit ones without weights.

    With `load_packed` the packed tensors are created empty on `device`, to be loaded into. Without, the dense
    parameter stays and the companions are created empty: the weight is rounded when it arrives.
    """
    for module, group in _by_module(targets):
        dtype = next(t.module._parameters[t.parameter].dtype for t in group)
        _become_lowbit(module, group)
        for target in group:
            dense = module._parameters[target.parameter]
            install(module, target.parameter, target.packed, None, device)
            if not load_packed:
                module._parameters[target.parameter] = dense
            for suffix in target.packed.tensors():
                if suffix or load_packed:
                    # transformers draws random numbers for what it takes to be missing. Marked one by one and not as a
                    # module: a bias, or a dense weight still to be rounded, that really is missing has to be drawn
                    module._parameters[target.parameter + suffix]._is_hf_initialized = True
        if group[0].kind == "embedding":
            module.remember_dtype(dtype, device)


def convert(
    targets: list[Target],
    rounding: Callable[[Target, torch.Tensor], dict[str, torch.Tensor]] | None = None,
    quiet: bool = False,
) -> None:
    """Round and pack the dense weights of the targets, one tensor at a time. Tied targets share the result.

    `rounding` gives the stored tensors of a target and its dense weight (default: round to nearest). `quiet` shows no
    progress.

    Raises ValueError naming the layer when a weight holds NaN or infinity; then no module has been changed.
    """
    targets = [target for target in targets if target.packed is not None]
    check_finite(targets)
    made: dict[int, dict] = {}
    shared = _shared(targets)
    rounding = rounding or quantize
    groups = list(_by_module(targets))
    for module, group in groups if quiet else logging.tqdm(groups, desc="Quantizing weights"):
        weights = {target.parameter: module._parameters[target.parameter] for target in group}
        _become_lowbit(module, group)
        for target in group:
            weight = weights[target.parameter]
            stored = made.get(id(weight)) or rounding(target, weight)
            if id(weight) in shared:
                # keep the dense weight alive until the end: its id is the key
                made[id(weight)] = {**stored, "dense": weight}
            stored = {suffix: t for suffix, t in stored.items() if suffix != "dense"}
            install(module, target.parameter, target.packed, stored)
            if target.kind == "embedding":
                module.remember_dtype(weight.dtype, weight.device)
        module._is_hf_initialized = True
    _share_parameters(targets, made)


def quantize(target: Target, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """`quantize_weight` whose errors name the module."""
    try:
        return quantize_weight(weight, target.packed)
    except ValueError as error:
        raise ValueError(f"`{target.name}`: {error}. Repair the checkpoint or leave the module dense.") from None


def check_finite(targets: Iterable[Target]) -> None:
    """Raise ValueError naming every target whose dense weight holds NaN or infinity."""
    bad = []
    for target in targets:
        weight = target.module._parameters[target.parameter]
        if weight.device.type == "meta":
            continue
        # without a copy; in float32, since rounding works in it and float64 reaches further
        extremes = torch.stack(torch.aminmax(weight.detach())).to(torch.float32)
        if not bool(torch.isfinite(extremes).all()):
            bad.append(target.name)
    if bad:
        raise ValueError(
            f"the weights of {', '.join(f'`{name}`' for name in bad)} hold NaN or infinity: nothing was changed."
        )


def flatten_head(model: nn.Module) -> None:
    """Let a dense output layer flatten its input (see `FlatLinear`)."""
    for head in _output_layers(model):
        if type(head) is nn.Linear:
            head.__class__ = FlatLinear


def restore_dense(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Turn the low-bit ones among `modules` back into their dense classes, with the numbers of their codes in `dtype`.

    Weights that were tied stay tied.
    """
    made: dict[int, nn.Parameter] = {}
    # tensors whose ids are keys must live until the end
    keep = []
    for module in list(modules):
        if isinstance(module, FlatLinear):
            module.__class__ = nn.Linear
        if not isinstance(module, LowBitModule):
            continue
        for name in list(module.lowbit):
            packed = module._parameters[name]
            keep.append(packed)
            if id(packed) not in made:
                made[id(packed)] = nn.Parameter(module.dense_weight(name, dtype))
            remove(module, name, made[id(packed)])
        for key in ("training_form", "_form", "_coarse", "sharing"):
            module.__dict__.pop(key, None)
        module._buffers.pop("output_like", None)
        module._non_persistent_buffers_set.discard("output_like")
        module.__class__ = dense_class(module)
        del module.__dict__["lowbit"]


def _become_lowbit(module: nn.Module, group: list[Target]) -> None:
    module.__class__ = lowbit_class(type(module), group[0].kind, tuple(sorted(t.parameter for t in group)))


def _by_module(targets: Iterable[Target]) -> Iterable[tuple[nn.Module, list[Target]]]:
    groups: dict[int, tuple[nn.Module, list[Target]]] = {}
    for target in targets:
        if target.packed is not None:
            groups.setdefault(id(target.module), (target.module, []))[1].append(target)
    return groups.values()


def _shared(targets: list[Target]) -> set[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for target in targets:
        key = id(target.module._parameters[target.parameter])
        (shared if key in seen else seen).add(key)
    return shared


def _share_parameters(targets: list[Target], made: dict[int, dict]) -> None:
    """Make tied targets hold the very same Parameters, as their dense weights were one."""
    for stored in made.values():
        holders = [t for t in targets if t.module._parameters[t.parameter].data_ptr() == stored[""].data_ptr()]
        for holder in holders[1:]:
            for suffix in holder.packed.tensors():
                name = holder.parameter + suffix
                holder.module._parameters[name] = holders[0].module._parameters[holders[0].parameter + suffix]


def _output_layers(model: nn.Module) -> list[nn.Module]:
    layers = []
    for module in model.modules():
        if hasattr(module, "get_output_embeddings"):
            try:
                layers.append(module.get_output_embeddings())
            except (NotImplementedError, AttributeError):
                # encoders and composite models have none
                continue
    return layers
