"""The plan of a compression: which scheme each weight gets, from `bits`, from a budget, or from this machine's memory.

Planned weights are those that are low-bit by default, and with a budget the embedding and the output layer too. What
is planned stands in the config's `modules`, where a user can edit it.
"""

from __future__ import annotations

from torch import nn

from ..compression.allocate import Option, allocate, smallest
from ..compression.budget import cache_bytes, free_bytes, parse_budget
from ..compression.sensitivity import candidates, fisher, options
from ..configs.lowbit import LowBitConfig
from ..configs.scheme import BITS, Scheme
from ..nn.targets import Target, find_targets


# what most shapes divide by; more groups cost more bytes, fewer more quality
GROUP_SIZES = (128, 64, 32)


def group_size_for(targets: list[Target]) -> int:
    """The largest group size that the inputs of all weights divide by; the smallest where none does (groups are then
    padded inside)."""
    sizes = {t.packed.in_features for t in targets if t.packed is not None}
    return next((g for g in GROUP_SIZES if all(size % g == 0 for size in sizes)), GROUP_SIZES[-1])


def plan(
    model: nn.Module, bits: str | int | float | None, budget: str | int | None, batches: list[dict] | None, seed: int
) -> tuple[LowBitConfig, list[Option], list[Target]]:
    """A config whose `modules` name every weight, the option chosen for each, and the weights.

    Raises ValueError for `bits` and `budget` together, and for a budget that nothing fits: the smallest size is named.
    """
    if bits is not None and budget is not None:
        raise ValueError(f"`bits`={bits!r} and `budget`={budget!r} both say how large; pass one of them.")
    targets = [t for t in find_targets(model, LowBitConfig(bits=4, group_size=None)) if t.packed is not None]
    group_size = group_size_for(targets)
    if bits is not None and not isinstance(bits, float):
        scheme = Scheme(bits, "tensor" if bits == "ternary" else group_size)
        chosen = [options(t, [scheme], None)[0] for t in targets]
        return LowBitConfig(bits=bits, group_size=scheme.group_size), chosen, targets
    if bits is not None:
        weights = sum(t.packed.parameters for t in targets)
        limit, what = int(bits * weights / 8), f"`bits`={bits}"
    else:
        targets += _tables(model, targets)
        dense = sum(p.numel() * p.element_size() for p in model.parameters())
        rest = dense - _dense_bytes(targets)
        total = free_bytes() - cache_bytes(model.config) if budget is None else parse_budget(budget, dense)
        limit, what = total - rest, f"a budget of {total / 1e6:.1f} MB" if budget is None else f"`budget`={budget!r}"
    importance = {} if batches is None else fisher(model, targets, batches, seed)
    schemes = candidates(group_size)
    table = [options(t, schemes, importance.get(t.name)) for t in targets]
    if smallest(table) > limit:
        least = smallest(table)
        if isinstance(bits, float):
            raise ValueError(
                f"{what} is impossible: with scales the smallest plan has {8 * least / weights:.2f} bits a weight."
            )
        raise ValueError(f"{what} is impossible: the smallest plan takes {rest + least:,} bytes.")
    chosen = allocate(table, limit)
    modules = {t.name: option.scheme for t, option in zip(targets, chosen, strict=True)}
    return LowBitConfig(bits=4, group_size=group_size, modules=modules), chosen, targets


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


def average_bits(chosen: list[Option], targets: list[Target]) -> float:
    """Bits a weight of the plan, scales included."""
    return 8 * sum(o.bytes for o in chosen) / max(1, sum(t.packed.parameters for t in targets))


def known_bits(bits) -> None:
    """Raise for bits that no scheme and no plan has."""
    if bits is None or bits in BITS and not isinstance(bits, bool) and not isinstance(bits, float):
        return
    if not isinstance(bits, float) or not 2 <= bits <= 16:
        raise ValueError(f'`bits`={bits!r} must be "ternary", 2, 3, 4, 8, or a float such as 3.2: an average.')
