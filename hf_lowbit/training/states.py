"""Optimizer states of one weight, at 32, 16, 8 or 4 bits, as plain tensors in a dict that is saved as it is.

    {"t": steps so far, "m": Tensor}                           32 and 16 bits (bfloat16)
    {"t": steps so far, "m": codes uint8, "m_base": int16}     8 and 4 bits (hf_lowbit/functional/moments.py)

Reading gives float32, writing rounds stochastically, with noise that belongs to the element and the step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import moments as formats
from .rules import Moments, Rule


STATE_BITS = (32, 16, 8, 4)
# smaller weights keep float32: their states are no memory, and norms and biases are sensitive
SMALLEST = 4096


def check_state_bits(bits: int) -> None:
    """Raise ValueError for bits that no state has."""
    if isinstance(bits, bool) or bits not in STATE_BITS:
        raise ValueError(f"`state_bits`={bits!r} is not supported; use one of {list(STATE_BITS)}.")


class States:
    """The moments that `rule` keeps for a weight of `rows` x `columns`, of its rows `own` where these are given.

    `tensors` is the dict described above; give one that was saved, of all rows, to continue from it.
    """

    def __init__(
        self,
        rule: Rule,
        rows: int,
        columns: int,
        bits: int,
        device,
        tensors: dict | None = None,
        own: slice | None = None,
    ):
        self.rule, self.columns = rule, columns
        self.bits = bits if rows * columns >= SMALLEST else 32
        if tensors is None:
            tensors = self._empty(rows if own is None else own.stop - own.start, columns, device)
        else:
            _check_saved(tensors, self._empty(rows, columns, "meta"))
            tensors = {name: v if name == "t" else _part(v, own).to(device) for name, v in tensors.items()}
        self.tensors = tensors

    @property
    def needs_noise(self) -> bool:
        """Whether writing rounds."""
        return self.bits < 32 and bool(self.rule.moments)

    def read(self, rows: slice) -> Moments:
        """The moments of some rows, float32; vectors whole."""
        found = {name: self.tensors[name] for name in self.rule.vectors}
        for name, signed in self.rule.moments.items():
            stored = self.tensors[name][rows]
            if self.bits in (8, 4):
                stored = formats.decode(stored, self.tensors[f"{name}_base"][rows], self.bits, signed, self.columns)
            found[name] = stored.to(torch.float32)
        return found

    def write(self, rows: slice, moments: Moments, noise: Tensor | None) -> None:
        """Store the moments of some rows. `noise`: int32 words, one for each element, when `needs_noise`."""
        for name in self.rule.vectors:
            self.tensors[name].copy_(moments[name])
        for position, (name, signed) in enumerate(self.rule.moments.items()):
            value = moments[name]
            if self.bits == 32:
                self.tensors[name][rows] = value
                continue
            # another moment takes other bits of the word
            words = noise if position == 0 else (noise >> 8) ^ (noise << 24)
            if self.bits == 16:
                self.tensors[name][rows] = formats.to_bfloat16(value, words)
            else:
                codes, base = formats.encode(value, words, self.bits, signed)
                self.tensors[name][rows], self.tensors[f"{name}_base"][rows] = codes, base

    def clear(self, where: Tensor) -> None:
        """Forget the moments of the elements in `where` (bool [R, K]): zero, or the smallest number a format has.
        Vectors, which many elements share, stay."""
        for name in self.rule.moments:
            tensor = self.tensors[name]
            if self.bits != 4:
                tensor.masked_fill_(where, 0)
                continue
            where = F.pad(where, (0, where.shape[1] % 2))
            tensor &= torch.where(where[:, 0::2], 0xF0, 0xFF) & torch.where(where[:, 1::2], 0x0F, 0xFF)

    def _empty(self, rows: int, columns: int, device) -> dict:
        tensors: dict = {"t": 0}
        for name, dimension in self.rule.vectors.items():
            tensors[name] = torch.zeros((rows, 1) if dimension == 1 else (1, columns), device=device)
        for name in self.rule.moments:
            if self.bits in (32, 16):
                dtype = torch.float32 if self.bits == 32 else torch.bfloat16
                tensors[name] = torch.zeros(rows, columns, dtype=dtype, device=device)
                continue
            width = columns if self.bits == 8 else -(-columns // 2)
            blocks = formats.blocks_of(columns, self.bits).count
            # code 0 at base 0 reads as zero, or as the smallest positive number that there is
            tensors[name] = torch.zeros(rows, width, dtype=torch.uint8, device=device)
            tensors[f"{name}_base"] = torch.zeros(rows, blocks, dtype=torch.int16, device=device)
        return tensors


def _part(tensor: Tensor, own: slice | None) -> Tensor:
    # a copy, so that the whole can go
    return tensor if own is None else tensor[own].clone()


def _check_saved(saved: dict, expected: dict) -> None:
    for name, tensor in expected.items():
        found = saved.get(name)
        if found is None or (name != "t" and (found.shape, found.dtype) != (tensor.shape, tensor.dtype)):
            is_ = "missing" if found is None else f"{found.dtype} {tuple(found.shape)}"
            wanted = "a count" if name == "t" else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(
                f"its state `{name}` is {is_}, expected {wanted}: the state was saved for another model, "
                "`optimizer` or `state_bits`"
            )
