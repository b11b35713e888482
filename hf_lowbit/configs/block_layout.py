"""`BlockLayout`: which tensors hold the blocks of one weight, as the saved config of a block-sparse model lists it
(docs/format.md)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from .dense_shape import DenseShape


BALANCES = ("row", "none")
FORMS = ("dense", "codes", "blocks")
BLOCK_BITS = (None, 8, 4, "ternary")
ACTIVATIONS = ("float", "int8")


@dataclass(frozen=True)
class BlockLayout(DenseShape):
    """How the blocks of one weight are stored.

    `shape` is the dense shape as the model defines it: [N, K], [K, N] (`transposed`), or with a leading E for fused
    experts; `block` rows and columns of a block of the dense [N, K].
    `form`: "dense" holds the whole weight with zeros in dead blocks (while it is trained), "codes" does so in codes of
    `bits` (while they are trained), "blocks" holds the live blocks only. `balance`: "row", `live` blocks in every
    block row; "none", `live` blocks in all (of all experts), with row pointers. `bits`: of the live blocks once only
    they are held, or while their codes are trained; None keeps them float. `activations` of a product with such codes:
    "float", or "int8" for each token.
    """

    shape: tuple[int, ...]
    block: tuple[int, int]
    form: str
    balance: str
    live: int
    transposed: bool = False
    bits: str | int | None = None
    activations: str = "float"

    def __post_init__(self):
        for field, most in (("shape", 3), ("block", 2)):
            value = getattr(self, field)
            valid = isinstance(value, (list, tuple)) and 2 <= len(value) <= most
            if not valid or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value):
                sizes = "two positive sizes" + (", or three of fused experts" if most == 3 else "")
                raise ValueError(f"`{field}`={value!r} must be {sizes}.")
            object.__setattr__(self, field, tuple(value))
        if self.form not in FORMS:
            raise ValueError(f"`form`={self.form!r} is not known; use one of {list(FORMS)}.")
        if self.balance not in BALANCES:
            raise ValueError(f"`balance`={self.balance!r} is not known; use one of {list(BALANCES)}.")
        if isinstance(self.bits, bool) or self.bits not in BLOCK_BITS:
            raise ValueError(f"`bits`={self.bits!r} is not known; use one of {list(BLOCK_BITS)}.")
        if self.activations not in ACTIVATIONS:
            raise ValueError(f"`activations`={self.activations!r} is not known; use one of {list(ACTIVATIONS)}.")
        limit = self.grid[1] if self.balance == "row" else self.blocks
        if isinstance(self.live, bool) or not isinstance(self.live, int) or not 0 <= self.live <= limit:
            raise ValueError(f"`live`={self.live!r} must be a number of blocks between 0 and {limit}.")

    @property
    def oriented_shape(self) -> tuple[int, ...]:
        """[..., N, K]."""
        return (*self.experts, self.out_features, self.in_features)

    @property
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns of a matrix; the last ones may reach over the edge."""
        return -(-self.out_features // self.block[0]), -(-self.in_features // self.block[1])

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """[..., NB, KB]."""
        return (*self.experts, *self.grid)

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return math.prod(self.mask_shape)

    @property
    def pool(self) -> int:
        """The blocks of which a fixed number lives: those of a block row, or of a matrix."""
        return self.grid[1] if self.balance == "row" else self.grid[0] * self.grid[1]

    @property
    def live_blocks(self) -> int:
        """Live blocks in all."""
        return self.live * math.prod(self.mask_shape[:-1]) if self.balance == "row" else self.live

    @property
    def sparsity(self) -> float:
        """Share of dead blocks."""
        return 1 - self.live_blocks / self.blocks

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "shape": list(self.shape), "block": list(self.block)}
