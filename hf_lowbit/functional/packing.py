"""How codes are stored: bit fields, row by row (docs/format.md has the byte diagram).

`pack` and `unpack` are inverse on codes inside the grid, never change their argument, and work on the last dimension:
int8 [..., K] <-> int8 [..., R]. Three bits are stored as a plane of the two low bits followed by a plane of the high
bit, so that every field is a power of two wide and no field crosses a byte: a vector unit then needs only masks and
shifts.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from .grid import Grid


def row_bytes(in_features: int, grid: Grid) -> int:
    """R, the bytes that hold one row of `in_features` codes."""
    if grid.field_bits == 3:
        return -(-in_features // 4) + -(-in_features // 8)
    return -(-in_features * grid.field_bits // 8)


def pack(codes: Tensor, grid: Grid) -> Tensor:
    """Pack int8 codes [..., K] into int8 bytes [..., R]. Codes outside the grid raise ValueError."""
    if codes.dtype != torch.int8:
        raise TypeError(f"`codes` must be int8, got {codes.dtype}.")
    if codes.numel() and (int(codes.min()) < grid.qmin or int(codes.max()) > grid.qmax):
        raise ValueError(
            f"`codes` span [{int(codes.min())}, {int(codes.max())}], outside [{grid.qmin}, {grid.qmax}] of "
            f"{grid.bits} bits."
        )
    if grid.field_bits == 8:
        return codes.clone()
    fields = (codes - grid.qmin).view(torch.uint8)
    if grid.field_bits == 3:
        return torch.cat([_pack_fields(fields & 3, 2), _pack_fields(fields >> 2, 1)], dim=-1)
    return _pack_fields(fields, grid.field_bits)


def unpack(packed: Tensor, grid: Grid, in_features: int) -> Tensor:
    """Codes int8 [..., K] of the bytes int8 [..., R] that `pack` wrote for K = `in_features`."""
    if packed.dtype is not torch.int8:
        raise not_codes(packed)
    if packed.shape[-1] != row_bytes(in_features, grid):
        raise ValueError(
            f"Expected {row_bytes(in_features, grid)} bytes a row for {in_features} codes of {grid.bits} bits. "
            f"Got {packed.shape[-1]}."
        )
    if grid.field_bits == 8:
        return packed.clone()
    stored = packed.view(torch.uint8)
    if grid.field_bits == 3:
        low_bytes = -(-in_features // 4)
        fields = _unpack_fields(stored[..., :low_bytes], 2, in_features)
        fields = fields | (_unpack_fields(stored[..., low_bytes:], 1, in_features) << 2)
    else:
        fields = _unpack_fields(stored, grid.field_bits, in_features)
    return fields.view(torch.int8) + grid.qmin


def not_codes(weight: Tensor) -> TypeError:
    """The error for floats where packed codes belong: read as bytes, they would give numbers that mean nothing."""
    return TypeError(
        f"the weight of a low-bit layer is {weight.dtype} {list(weight.shape)}; packed codes are torch.int8. "
        "Something assigned dense numbers to it: assign them to the dense model and quantize that, or `dequantize()`."
    )


# fields of 2 and 4 bits move between a byte and the bytes of one integer by shifts, all fields of it at a time
SPREAD = {2: (torch.int32, 6, 0x03030303), 4: (torch.int16, 4, 0x0F0F)}


def _pack_fields(fields: Tensor, width: int) -> Tensor:
    per_byte = 8 // width
    if width in SPREAD and fields.shape[-1] % per_byte == 0 and _whole(fields):
        dtype, shift, _ = SPREAD[width]
        wide = fields.contiguous().view(dtype)
        packed = wide.clone()
        for position in range(1, per_byte):
            packed |= wide >> (position * shift)
        return packed.bitwise_and_(0xFF).to(torch.uint8).view(torch.int8)
    fields = F.pad(fields, (0, -fields.shape[-1] % per_byte))
    fields = fields.unflatten(-1, (fields.shape[-1] // per_byte, per_byte))
    packed = fields[..., 0].clone()
    for position in range(1, per_byte):
        packed |= fields[..., position] << (position * width)
    return packed.view(torch.int8)


def _unpack_fields(stored: Tensor, width: int, in_features: int) -> Tensor:
    mask = (1 << width) - 1
    if width in SPREAD and _whole(stored):
        dtype, shift, wide_mask = SPREAD[width]
        # contiguous, and not merely dense: one column may have any stride
        wide = stored.to(dtype, memory_format=torch.contiguous_format).reshape(-1)
        fields = wide.clone()
        for position in range(1, 8 // width):
            # a product, since torch's left shift does not use vector instructions
            fields |= wide * (1 << (position * shift))
        fields = fields.bitwise_and_(wide_mask).view(torch.uint8).view(*stored.shape[:-1], -1)
        return fields if fields.shape[-1] == in_features else fields[..., :in_features].contiguous()
    fields = torch.stack([(stored >> (position * width)) & mask for position in range(8 // width)], dim=-1)
    # contiguous, since the callers reinterpret the bytes
    return fields.flatten(-2)[..., :in_features].contiguous()


def _whole(x: Tensor) -> bool:
    """Can the bytes of `x` be read as wider integers? Not on big-endian machines, where their order differs."""
    return x.numel() > 0 and x.ndim > 0 and sys.byteorder == "little"
