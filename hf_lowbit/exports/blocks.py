"""llama.cpp's blocks: runs of 32 or 256 weights of a row with a float16 scale of their own.

    Q4_0   32   d fp16, 16 bytes    byte j: u[j + 16] u[j], u = c + 8           w = d * (u - 8)
    Q4_1   32   d, m fp16, 16 bytes byte j: u[j + 16] u[j]                      w = d * u + m
    Q8_0   32   d fp16, 32 bytes    c                                           w = d * c
    TQ2_0 256   64 bytes, d fp16    byte 32h + j: c + 1 of 128h + j + 32n       w = d * c,  c in {-1, 0, 1}
                                    in bits 2n and 2n + 1, n = 0..3, h = 0, 1

c are signed codes. Source: ggml-common.h and gguf-py's quants.py; the tests decode with gguf-py.

Shape legend: N rows, K weights a row, B = K / block blocks a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


BLOCK = {"Q4_0": 32, "Q4_1": 32, "Q8_0": 32, "TQ2_0": 256}


def q4_0(codes: Tensor, scale: Tensor) -> Tensor:
    """int8 codes [N, K] in [-8, 7] and float16 scales [N, B] to uint8 [N, 18 B]."""
    return _rows([_bytes(scale.unsqueeze(-1)), _nibbles(_blocks(codes + 8, 32))])


def q4_1(fields: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Fields int8 [N, K] in [0, 15], float16 scales and minima [N, B] to uint8 [N, 20 B]."""
    return _rows([_bytes(scale.unsqueeze(-1)), _bytes(minimum.unsqueeze(-1)), _nibbles(_blocks(fields, 32))])


def q8_0(codes: Tensor, scale: Tensor) -> Tensor:
    """int8 codes [N, K] and float16 scales [N, B] to uint8 [N, 34 B]."""
    return _rows([_bytes(scale.unsqueeze(-1)), _blocks(codes, 32).view(torch.uint8)])


def tq2_0(codes: Tensor, scale: Tensor) -> Tensor:
    """Ternary int8 codes [N, K] and float16 scales [N, B] to uint8 [N, 66 B]."""
    fields = _blocks(codes + 1, 256).view(torch.uint8).unflatten(-1, (2, 4, 32))
    packed = fields[..., 0, :].clone()
    for position in range(1, 4):
        packed |= fields[..., position, :] << (2 * position)
    return _rows([packed.flatten(-2), _bytes(scale.unsqueeze(-1))])


def _blocks(codes: Tensor, block: int) -> Tensor:
    return codes.unflatten(-1, (-1, block)).contiguous()


def _nibbles(fields: Tensor) -> Tensor:
    fields = fields.view(torch.uint8)
    return fields[..., :16] | (fields[..., 16:] << 4)


def _bytes(scale: Tensor) -> Tensor:
    if scale.dtype != torch.float16:
        raise TypeError(f"scales of blocks must be float16, got {scale.dtype}.")
    return scale.contiguous().view(torch.uint8)


def _rows(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=-1).flatten(-2)
