"""LoRA that starts from what rounding lost, instead of from nothing.

A low-bit layer holds Q in the place of W. With E = W - Q = U S V^T, the rank-r update nearest to E (Eckart-Young) is
its first r singular triples, and the adapter that adds it, with PEFT's factor c (`lora_alpha / r`), is

    B = U_r S_r^(1/2) / c^(1/2),     A = S_r^(1/2) V_r^T / c^(1/2)        c B A = U_r S_r V_r^T

so that the adapted model starts nearer to the dense one. This is the first step of LoftQ (Li et al. 2023, algorithm
1). Its further steps round W - B A again and so change the base; here the base stays as it was saved, and the adapter
fits the checkpoint that everybody has. Every grid is served, ternary too.

PEFT's own "loftq" quantizes to its own formats, and `replace_lora_weights_loftq` reads bitsandbytes only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import nn

from ..compression.inspect import class_of
from ..nn.packed import LowBitModule
from .adapter import LowBitAdapter


# more directions than asked for, and passes: the error's singular values fall slowly
OVERSAMPLED = 16
PASSES = 6


@dataclass(frozen=True)
class ErrorFall:
    """|W - Q| / |W| of one layer, without its adapter and with it."""

    module: str
    before: float
    after: float


@torch.no_grad()
def initialize_from_error(
    model: nn.Module, dense: nn.Module | str | os.PathLike, adapter_name: str = "default"
) -> list[ErrorFall]:
    """Set the LoRA weights of a PEFT model to the part of the quantization error that they can hold.

    Args:
        model: a PEFT model over low-bit layers; only its LoRA weights change, in place.
        dense: the model that was quantized, or its folder or Hub id (then it is loaded whole, in its own dtype).
        adapter_name: which adapter.

    Returns:
        One entry a layer: its relative error before and after.

    Raises:
        ValueError: when there is no such LoRA adapter over low-bit layers, one is merged or uses DoRA (whose
            magnitudes belong to the old start), or `dense` lacks a layer or has another shape there.
    """
    layers = [m for m in model.modules() if isinstance(m, LowBitAdapter) and adapter_name in getattr(m, "lora_A", {})]
    if not layers:
        raise ValueError(f"`adapter_name`={adapter_name!r}: no low-bit layer here has such a LoRA adapter.")
    for layer in layers:
        if not isinstance(layer.get_base_layer(), LowBitModule) or layer.merged:
            raise ValueError(f"`{layer.lowbit_name}` has an adapter merged into it; call unmerge_adapter() first.")
        if adapter_name in getattr(layer, "lora_magnitude_vector", {}):
            raise ValueError(
                f"`{layer.lowbit_name}` uses DoRA, whose magnitudes belong to the start that it has; use LoRA."
            )
    if not isinstance(dense, nn.Module):
        dense = class_of(dense)[0].from_pretrained(dense, dtype="auto")
    weights = [_weight_of(layer, dense) for layer in layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [_start(layer, weight, adapter_name) for layer, weight in zip(layers, weights, strict=True)]


def _weight_of(layer: LowBitAdapter, dense: nn.Module) -> torch.Tensor:
    """The dense weight behind a layer, in the layer's orientation."""
    name, expected = layer.lowbit_name, layer.get_base_layer().lowbit["weight"].shape
    try:
        weight = dense.get_submodule(name).weight
    except AttributeError:
        weight = None
    if not isinstance(weight, torch.Tensor) or tuple(weight.shape) != tuple(expected):
        found = "does not exist" if weight is None else f"is {tuple(weight.shape)}, not {tuple(expected)}"
        raise ValueError(f"`{name}.weight` of `dense` {found}: it is not the model that was quantized.")
    return weight.detach()


def _start(layer: LowBitAdapter, weight: torch.Tensor, adapter_name: str) -> ErrorFall:
    base, a, b = layer.get_base_layer(), layer.lora_A[adapter_name].weight, layer.lora_B[adapter_name].weight
    codes = base._parameters["weight"]
    weight = weight.to(codes.device, torch.float32)
    error = weight - base.dense_weight()
    if base.lowbit["weight"].transposed:
        error = error.T
    rank, factor = a.shape[0], layer.scaling[adapter_name]
    kept = min(rank, *error.shape)
    width = min(kept + OVERSAMPLED, *error.shape)
    u, s, v = torch.svd_lowrank(error, q=width, niter=PASSES)
    root = (s[:kept] / factor).sqrt()
    # a rank above the matrix's own leaves the rest at nothing
    a.zero_()
    b.zero_()
    a[:kept] = (v[:, :kept] * root).T.to(a.dtype)
    b[:, :kept] = (u[:, :kept] * root).to(b.dtype)
    rest = error - factor * b.to(torch.float32) @ a.to(torch.float32)
    size = float(weight.norm()) or 1.0
    return ErrorFall(layer.lowbit_name, float(error.norm()) / size, float(rest.norm()) / size)
