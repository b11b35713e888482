"""The plan of a compression: which scheme each weight gets, from `bits`, from a budget, or from this machine's memory.

Planned weights are those that are low-bit by default, and with a budget the embedding and the output layer too. What
is planned stands in the config's `modules`, where a user can edit it.
"""

from __future__ import annotations

from torch import nn

from ..configs.lowbit import LowBitConfig
from ..configs.scheme import BITS, Scheme
from ..nn.packed import PackedWeight
from ..nn.targets import Target, find_targets
from .allocate import allocate
from .budget import cache_bytes, free_bytes, parse_budget
from .sensitivity import candidates, fisher, options


# what most shapes divide by; more groups cost more bytes, fewer more quality
GROUP_SIZES = (128, 64, 32)


def group_size_for(targets: list[Target]) -> int:
    """The largest group size that the inputs of all weights divide by; the smallest where none does (groups are then
    padded inside)."""
    sizes = {t.packed.in_features for t in targets}
    return next((g for g in GROUP_SIZES if all(size % g == 0 for size in sizes)), GROUP_SIZES[-1])


def uniform(model: nn.Module, bits: str | int) -> LowBitConfig:
    """The same bits for every weight, in the largest groups that fit all; one scale a tensor for ternary."""
    if bits == "ternary":
        return LowBitConfig(bits=bits, group_size="tensor")
    return LowBitConfig(bits=bits, group_size=group_size_for(_converted(model)))


def plan(
    model: nn.Module, bits: float | None, budget: str | int | None, batches: list[dict] | None, seed: int
) -> LowBitConfig:
    """A config whose `modules` name every weight with the scheme chosen for it, by average `bits`, by `budget`, or
    with neither by this machine's memory.

    Raises ValueError for a size that nothing fits: the smallest one is named.
    """
    targets = _converted(model)
    group_size = group_size_for(targets)
    dense = sum(p.numel() * p.element_size() for p in model.parameters())
    if bits is not None:
        weights, rest = sum(t.packed.parameters for t in targets), 0
        limit = int(bits * weights / 8)
    else:
        targets += _tables(model, targets)
        rest = dense - _dense_bytes(targets)
        limit = (_memory(model) if budget is None else parse_budget(budget, dense)) - rest
    schemes = candidates(group_size)
    least = sum(min(_bytes(t, scheme) for scheme in schemes) for t in targets)
    if least > limit and bits is not None:
        raise ValueError(
            f"`bits`={bits} is impossible: with scales the smallest plan has {8 * least / weights:.2f} bits a weight."
        )
    if least > limit:
        asked = "this machine's memory" if budget is None else f"`budget`={budget!r}"
        raise ValueError(f"{asked} is impossible: the smallest plan takes {rest + least:,} bytes.")
    importance = {} if batches is None else fisher(model, targets, batches, seed)
    chosen = allocate([options(t, schemes, importance.get(t.name)) for t in targets], limit)
    modules = {t.name: option.scheme for t, option in zip(targets, chosen, strict=True)}
    return LowBitConfig(bits=4, group_size=group_size, modules=modules)


def _converted(model: nn.Module) -> list[Target]:
    """The weights that are low-bit by default."""
    return [t for t in find_targets(model, LowBitConfig(bits=4, group_size=None)) if t.packed is not None]


def _bytes(target: Target, scheme: Scheme) -> int:
    return PackedWeight(scheme, target.packed.shape, target.transposed).bytes()


def _memory(model: nn.Module) -> int:
    """Bytes that weights may take here: what is free, less keys and values for models that generate."""
    return free_bytes() - (cache_bytes(model.config) if model.can_generate() else 0)


def _tables(model: nn.Module, targets: list[Target]) -> list[Target]:
    """The embedding and the output layer, where they can be low-bit; one of the two when they share their weight."""
    found: list[Target] = []
    taken = {id(t.module._parameters[t.parameter]) for t in targets}
    for get in (model.get_input_embeddings, model.get_output_embeddings):
        try:
            module = get()
        except NotImplementedError:
            continue
        name = next((n for n, m in model.named_modules() if m is module), None) if module is not None else None
        weight = None if module is None else module._parameters.get("weight")
        if not name or weight is None or id(weight) in taken:
            continue
        taken.add(id(weight))
        try:
            wanted = find_targets(model, LowBitConfig(bits=4, group_size=None, modules={name: Scheme(8, None)}))
        except ValueError:
            # its weight is read directly, or something else forbids it: it stays dense
            continue
        found += [t for t in wanted if t.packed is not None and t.module is module]
    return found


def _dense_bytes(targets: list[Target]) -> int:
    unique = {id(w): w for w in (t.module._parameters[t.parameter] for t in targets)}
    return sum(w.numel() * w.element_size() for w in unique.values())


def check_size(bits, budget) -> None:
    """Raise ValueError for bits that no scheme and no plan has, and for both `bits` and `budget`."""
    if bits is not None and budget is not None:
        raise ValueError(f"`bits`={bits!r} and `budget`={budget!r} both say how large; pass one of them.")
    if bits is None or bits in BITS and not isinstance(bits, bool) and not isinstance(bits, float):
        return
    if not isinstance(bits, float) or not 2 <= bits <= 16:
        raise ValueError(f'`bits`={bits!r} must be "ternary", 2, 3, 4, 8, or a float such as 3.2: an average.')
