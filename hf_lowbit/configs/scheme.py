"""How one weight is stored and multiplied: bits, group size, symmetry, activations."""

from __future__ import annotations

from dataclasses import asdict, dataclass


BITS = ("ternary", 2, 3, 4, 8)
ACTIVATIONS = ("float", "int8")
SCALES = (None, "bfloat16", "float32")


@dataclass(frozen=True)
class Scheme:
    """The grid of one module's weight, and the precision of the activations it is multiplied with.

    Args:
        bits: "ternary", 2, 3, 4 or 8.
        group_size: weights along the input that share a scale; None is one scale per output channel, "tensor" one for
            the whole weight. Need not divide the input size: the last group of a row is then shorter. symmetric:
            without zero points. None (default) chooses zero points at 2 and 3 bits, where they pay, and none at 4, 8
            and ternary. activations: "float" multiplies in the model's dtype (weight-only); "int8" rounds each token
            to 8 bits first. None (default) is "int8" for ternary, which is BitNet b1.58's own definition, and "float"
            for the rest. scales: "bfloat16" or "float32", the dtype in which the scales of groups are stored. None
            (default) is bfloat16; float32 holds those of imported checkpoints, which are float16. Without groups
            scales are float32, and this is None.

    Raises:
        TypeError, ValueError: with the field, its value and the allowed ones.
    """

    bits: str | int = 4
    group_size: int | str | None = 128
    symmetric: bool | None = None
    activations: str | None = None
    scales: str | None = None

    def __post_init__(self):
        if isinstance(self.bits, bool) or not isinstance(self.bits, (str, int)):
            raise TypeError(f"`bits`={self.bits!r} has type {type(self.bits).__name__}; use one of {list(BITS)}.")
        if self.bits not in BITS:
            raise ValueError(f"`bits`={self.bits!r} is not supported; use one of {list(BITS)}.")
        check_group_size(self.group_size)
        if self.symmetric is None:
            object.__setattr__(self, "symmetric", self.bits not in (2, 3))
        if not isinstance(self.symmetric, bool):
            raise TypeError(f"`symmetric`={self.symmetric!r} must be True, False or None.")
        if self.bits == "ternary" and not self.symmetric:
            raise ValueError("`symmetric`=False has no meaning for ternary weights {-1, 0, 1}; leave it None.")
        if self.activations is None:
            object.__setattr__(self, "activations", "int8" if self.bits == "ternary" else "float")
        if self.activations not in ACTIVATIONS:
            raise ValueError(f"`activations`={self.activations!r} is not supported; use one of {list(ACTIVATIONS)}.")
        if self.scales not in SCALES:
            raise ValueError(f"`scales`={self.scales!r} is not supported; use one of {list(SCALES)}.")
        if self.scales == "bfloat16" or self.block is None:
            # one spelling for one scheme
            object.__setattr__(self, "scales", None)

    def to_dict(self) -> dict:
        """The fields as plain JSON; `scales` only where it is not the default."""
        fields = asdict(self)
        if self.scales is None:
            del fields["scales"]
        return fields

    @property
    def block(self) -> int | None:
        """The group size as a number, or None when a scale serves a whole row or tensor."""
        return self.group_size if isinstance(self.group_size, int) else None


def check_group_size(group_size: int | str | None) -> None:
    """Raise unless `group_size` is a positive integer, None or "tensor"."""
    if group_size is None or group_size == "tensor":
        return
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(
            f'`group_size`={group_size!r} must be a positive integer, None (one scale per channel) or "tensor".'
        )
    if group_size < 1:
        raise ValueError(
            f'`group_size`={group_size} must be at least 1; use None for one scale per channel or "tensor".'
        )
