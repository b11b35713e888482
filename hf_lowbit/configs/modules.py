"""The fields of a config that name modules: which scheme and shape each has, and which stay dense."""

from __future__ import annotations

from collections.abc import Mapping

from .scheme import Scheme


def read_modules(modules, group_size: int | str | None) -> tuple[dict[str, Scheme], dict[str, tuple[int, ...]]]:
    if modules is None:
        return {}, {}
    if not isinstance(modules, Mapping):
        raise TypeError(f"`modules` must be a dict of name to Scheme, got {type(modules).__name__}.")
    schemes, shapes = {}, {}
    for name, value in modules.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"`modules` has the key {name!r}; keys are module names or 're:' patterns.")
        if isinstance(value, Mapping):
            value = dict(value)
            shape = value.pop("shape", None)
            # the fields decide by default, except that what follows from the bits follows from the module's own
            value.setdefault("group_size", group_size)
            if shape is not None:
                shapes[name] = _read_shape(name, shape)
            unknown = sorted(set(value) - {"bits", "group_size", "symmetric", "activations", "scales"})
            if unknown:
                raise TypeError(
                    f"`modules[{name!r}]` has no field {unknown[0]!r}; a Scheme has bits, group_size, symmetric, "
                    "activations and scales."
                )
            try:
                value = Scheme(**value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"`modules[{name!r}]`: {error}") from None
        if not isinstance(value, Scheme):
            raise TypeError(f"`modules[{name!r}]` must be a Scheme or a dict of its fields, got {value!r}.")
        schemes[name] = value
    return schemes, shapes


def _read_shape(name: str, shape) -> tuple[int, ...]:
    valid = isinstance(shape, (list, tuple)) and len(shape) in (2, 3)
    if not valid or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
        raise ValueError(f"`modules[{name!r}]` has `shape`={shape!r}; a shape is two or three sizes.")
    return tuple(shape)


def read_names(names) -> list[str]:
    if names is None:
        return []
    valid = isinstance(names, (list, tuple, set, frozenset))
    if not valid or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"`modules_to_not_convert`={names!r} must be a list of module names or 're:' patterns.")
    # a set has no order of its own: the same config must always be the same text
    return sorted(names) if isinstance(names, (set, frozenset)) else list(names)
