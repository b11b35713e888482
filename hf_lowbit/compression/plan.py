"""The plan of a compression: which scheme each weight gets, from `bits`, from a budget, or from this machine's memory.

Planned weights are those that are low-bit by default, and with a budget the embedding and the output layer too. What
a user names in `modules` keeps the scheme given there. The plan stands in the config's `modules`, where it can be
edited.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..configs.lowbit import LowBitConfig
from ..configs.scheme import BITS, Scheme
from ..configs.size import check_average, parse_budget
from ..nn.names import first_match
from ..nn.packed import PackedWeight
from ..nn.rules import between_modules, tied_groups
from ..nn.swap import check_finite
from ..nn.targets import Target, decide, find_targets
from .allocate import allocate
from .budget import cache_bytes, free_bytes
from .compensation import shares
from .sensitivity import candidates, fisher, options


# what most shapes divide by; more groups cost more bytes, fewer more quality
GROUP_SIZES = (128, 64, 32)


def group_size_for(targets: list[Target], most: int = GROUP_SIZES[0]) -> int:
    """`most` where the inputs of all weights divide by it, else the largest of 128, 64 and 32 below it; the smallest
    where none does (groups are then padded inside)."""
    sizes = {t.packed.in_features for t in targets}
    tried = [most, *(g for g in GROUP_SIZES if g < most)]
    return next((g for g in tried if all(size % g == 0 for size in sizes)), tried[-1])


def uniform(model: nn.Module, bits: str | int) -> LowBitConfig:
    """The same bits for every weight, in the largest groups that fit all; one scale a tensor for ternary."""
    if bits == "ternary":
        return LowBitConfig(bits=bits, group_size="tensor")
    return LowBitConfig(bits=bits, group_size=group_size_for(_converted(model, LowBitConfig())))


@dataclass(frozen=True)
class Frame:
    """What a plan chooses among: `targets` (of a tied weight one), `schemes` for each, and `limit` bytes in all."""

    targets: list[Target]
    schemes: list[Scheme]
    limit: int
    group_size: int | str | None


def plan(model: nn.Module, wishes: LowBitConfig, batches: list[dict] | None, seed: int = 0) -> LowBitConfig:
    """A config whose `modules` name every weight with the scheme chosen for it: by `wishes.bits` (an average), by
    `wishes.budget`, or with neither by this machine's memory. What else `wishes` says is kept.

    Raises ValueError for a size that nothing fits (the smallest one is named), and for weights with NaN or infinity.
    """
    frame = find_frame(model, wishes)
    check_finite(frame.targets)
    importance = {} if batches is None else _importance(model, frame.targets, batches, wishes.method, seed)
    with torch.no_grad():
        offers = [options(t, frame.schemes, importance.pop(t.name, None)) for t in frame.targets]
    chosen = allocate(offers, frame.limit)
    modules = {t.name: option.scheme for t, option in zip(frame.targets, chosen, strict=True)}
    return LowBitConfig(
        4, frame.group_size, _symmetric(wishes), wishes.activations, wishes.method,
        modules={**modules, **wishes.modules}, modules_to_not_convert=wishes.modules_to_not_convert,
    )  # fmt: skip


def _importance(
    model: nn.Module, targets: list[Target], batches: list[dict], method: str | None, seed: int
) -> dict[str, Tensor]:
    """{name: what a squared error of each weight costs, in the weight's shape}, with the rounding of `method`."""
    found = fisher(model, targets, batches, seed)
    if method == "rtn":
        return found
    left = shares(model, targets, batches)
    for target in targets:
        if target.name in left:
            found[target.name] *= left[target.name][:, None] if target.transposed else left[target.name]
    return found


def find_frame(model: nn.Module, wishes: LowBitConfig) -> Frame:
    """The frame of a plan of `model`, whose weights may be on the meta device.

    Raises ValueError for a size that nothing fits (the smallest one is named).
    """
    average = wishes.bits if isinstance(wishes.bits, float) else None
    targets, fixed = _split(model, wishes)
    group_size = wishes.group_size
    if isinstance(group_size, int) and targets:
        group_size = group_size_for(targets, group_size)
    schemes = candidates(group_size, _symmetric(wishes), wishes.activations)
    if average is None:
        targets = targets + _tables(model, wishes, [*targets, *fixed])
    if not targets:
        raise ValueError("nothing is left to plan: `modules` and `modules_to_not_convert` name every weight.")
    least = sum(min(_bytes(t, scheme) for scheme in schemes) for t in targets)
    if average is not None:
        weights = sum(t.packed.parameters for t in targets)
        limit = int(average * weights / 8)
        if least > limit:
            raise ValueError(
                f"`bits`={average} is impossible: with scales in groups of {group_size} the smallest plan has "
                f"{8 * least / weights:.2f} bits a weight."
            )
        return Frame(targets, schemes, limit, group_size)
    dense = _total_bytes(model)
    rest = dense - _dense_bytes([*targets, *fixed]) + sum(t.packed.bytes() for t in fixed)
    limit = (_memory(model) if wishes.budget is None else parse_budget(wishes.budget, dense)) - rest
    if least > limit:
        asked = "this machine's memory" if wishes.budget is None else f"`budget`={wishes.budget!r}"
        raise ValueError(
            f"{asked} is impossible: the smallest plan takes {rest + least:,} bytes of the dense {dense:,}."
        )
    return Frame(targets, schemes, limit, group_size)


def _split(model: nn.Module, wishes: LowBitConfig) -> tuple[list[Target], list[Target]]:
    """The converted weights that a plan decides, and those whose scheme `modules` gives; a tied weight once."""
    planned, fixed, taken = [], [], set()
    partners = _partners(model)
    converted = _converted(model, wishes)
    named = {t.parameter_name for t in converted if first_match(wishes.modules, t.name) is not None}
    for target in converted:
        names = partners.get(target.parameter_name, {target.parameter_name})
        if not taken & names:
            taken |= names
            (fixed if named & names else planned).append(target)
    return planned, fixed


def _partners(model: nn.Module) -> dict[str, set[str]]:
    """{parameter name: all names of the tensor} of tied parameters."""
    return {name: group for group in between_modules(model, tied_groups(model)) for name in group}


def _converted(model: nn.Module, wishes: LowBitConfig) -> list[Target]:
    """The weights that are low-bit by default, or because `modules` names them."""
    return [t for t in find_targets(model, wishes) if t.packed is not None]


def _symmetric(wishes: LowBitConfig) -> bool | None:
    # of a config that plans nothing it is that of four bits, which decides nothing here
    return wishes.symmetric if wishes.is_planned else None


def _bytes(target: Target, scheme: Scheme) -> int:
    return PackedWeight(scheme, target.packed.shape, target.transposed).bytes()


def _memory(model: nn.Module) -> int:
    """Bytes that weights may take here: what is free, less keys and values for models that generate."""
    return free_bytes() - (cache_bytes(model.config) if model.can_generate() else 0)


def _tables(model: nn.Module, wishes: LowBitConfig, known: list[Target]) -> list[Target]:
    """The embedding and the output layer, where they can be low-bit; one of the two when they share their weight."""
    found: list[Target] = []
    partners = _partners(model)
    taken = {name for t in known for name in partners.get(t.parameter_name, {t.parameter_name})}
    for get in (getattr(model, "get_input_embeddings", None), getattr(model, "get_output_embeddings", None)):
        try:
            module = get and get()
        except (NotImplementedError, AttributeError):
            # composite models and plain modules have none
            continue
        name = next((n for n, m in model.named_modules() if m is module), None) if module is not None else None
        if not name or f"{name}.weight" in taken or first_match(wishes.modules_to_not_convert, name) is not None:
            continue
        taken |= partners.get(f"{name}.weight", {f"{name}.weight"})
        try:
            wanted = decide(model, LowBitConfig(modules={name: Scheme(8, None)}))
        except ValueError:
            # its weight is read directly, or something else forbids it: it stays dense
            continue
        found += [t for t in wanted if t.packed is not None and t.module is module]
    return found


def _total_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, tied ones once: also where they are not one tensor yet, before they are loaded."""
    partners, total, taken = _partners(model), 0, set()
    for name, parameter in model.named_parameters():
        if name not in taken:
            taken |= partners.get(name, set())
            total += parameter.numel() * parameter.element_size()
    return total


def _dense_bytes(targets: list[Target]) -> int:
    weights = [t.module._parameters[t.parameter] for t in targets]
    return sum(w.numel() * w.element_size() for w in weights)


def check_size(bits, budget) -> None:
    """Raise ValueError for bits that no scheme and no plan has, and for both `bits` and `budget`."""
    if bits is not None and budget is not None:
        raise ValueError(f"`bits`={bits!r} and `budget`={budget!r} both say how large; pass one of them.")
    if isinstance(bits, float):
        check_average(bits)
    elif bits is not None and (isinstance(bits, bool) or bits not in BITS):
        raise ValueError(f'`bits`={bits!r} must be "ternary", 2, 3, 4, 8, or a float such as 3.2: an average.')
