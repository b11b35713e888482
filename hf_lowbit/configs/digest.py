"""A digest of how the tensors of a checkpoint are read, so that a changed config is found out.

Two schemes can want tensors of the same shapes: 576 columns have 9 groups of 64, and 9 groups of 70. Reading one as
the other gives wrong numbers without a sign. So a saved config carries a digest of its `modules`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from .scheme import Scheme


def modules_digest(modules: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """16 hexadecimal digits of SHA-256 over bits, group size, symmetry and shape of each module, in any order.

    How activations are treated is left out: it decides no stored number, and may be changed by hand.
    """
    read = {
        name: [scheme.bits, scheme.group_size, scheme.symmetric, list(shapes.get(name, ()))]
        for name, scheme in modules.items()
    }
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[:16]


def check_digest(found: str | None, modules: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError when a config carries another digest than its `modules` give; None is no digest."""
    expected = modules_digest(modules, shapes)
    if found is not None and found != expected:
        raise ValueError(
            f"`modules_digest`={found!r} does not belong to `modules`, whose digest is {expected!r}: the config was "
            "changed after the tensors were saved, and would read them as other numbers. Fetch the original "
            "config.json; to insist on the change, remove `modules_digest`."
        )
