"""A low-bit layer that is dense for a while: what it was before is kept, and comes back bit for bit.

Adapters need the numbers of a weight now and then: to initialize (DoRA's magnitudes), and to be merged. Their own code
then runs on the dense form of the layer, `W = s * (q - z)`, and the packed tensors themselves are never computed from
anything: `Original` holds them until `restore`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..functional.grid import dequantize, grid_of
from ..functional.packing import pack
from ..functional.rounding import to_codes
from .packed import LowBitModule, PackedWeight, quantize_weight
from .swap import restore_dense


@dataclass
class Original:
    """Class and tensors of a low-bit layer with one packed weight, named `weight`."""

    cls: type
    lowbit: dict[str, PackedWeight]
    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    unsaved_buffers: set[str]

    @classmethod
    def of(cls, module: LowBitModule) -> Original:
        """What `module` is now. The tensors are the module's own, not copies."""
        return cls(type(module), dict(module.lowbit), dict(module._parameters), dict(module._buffers),
                   set(module._non_persistent_buffers_set))  # fmt: skip

    def restore(self, module: nn.Module) -> None:
        """Make `module` what it was, on the device where it is now."""
        device = next(tensor.device for tensor in module._parameters.values() if tensor is not None)
        module.__class__ = self.cls
        module.lowbit = dict(self.lowbit)
        module._parameters.clear()
        for name, tensor in self.parameters.items():
            if tensor is not None and tensor.device != device:
                tensor = nn.Parameter(tensor.detach().to(device), requires_grad=tensor.requires_grad)
            module._parameters[name] = tensor
        module._buffers.clear()
        module._buffers.update(self.buffers)
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(self.unsaved_buffers)

    def requantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Put a dense `weight` back on the scheme of this layer. Returns the stored tensors by suffix.

        Of the scales and zero points that the layer had and those that a new search finds, the ones with the smaller
        squared error are taken: a weight that did not change keeps its very codes.
        """
        packed = self.lowbit["weight"]
        searched = quantize_weight(weight, packed)
        oriented = weight.detach().to(torch.float32)
        oriented = oriented.t() if packed.transposed else oriented
        grid, block = grid_of(packed.scheme.bits), packed.scheme.block
        scale, zero_point = self.parameters["weight_scale"], self.parameters["weight_zero_point"]
        scale = scale.detach().to(weight.device)
        zero_point = None if zero_point is None else zero_point.detach().to(weight.device)
        codes = to_codes(oriented, grid, scale, zero_point, block)
        kept = {"": pack(codes, grid).view(searched[""].shape), "_scale": scale.clone()}
        if zero_point is not None:
            kept["_zero_point"] = zero_point.clone()
        error = (dequantize(codes, scale, zero_point, block) - oriented).square().sum()
        found = stored_weight(packed, searched)
        return searched if (found - weight.to(torch.float32)).square().sum() < error else kept


def stored_weight(packed: PackedWeight, stored: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that packed tensors (by suffix) stand for, in the dense shape and orientation."""
    holder = LowBitModule()
    holder.lowbit = {"weight": packed}
    for suffix, tensor in stored.items():
        holder.register_parameter("weight" + suffix, nn.Parameter(tensor.detach(), requires_grad=False))
    return holder.dense_weight("weight", dtype)


def become_dense(module: LowBitModule, dtype: torch.dtype) -> None:
    """Make `module` dense in `dtype`, bias included, frozen, sharing no memory with what it was."""
    restore_dense([module], dtype)
    for name, tensor in list(module._parameters.items()):
        if tensor is not None:
            copy = tensor.detach() if name == "weight" else tensor.detach().to(dtype, copy=True)
            module._parameters[name] = nn.Parameter(copy, requires_grad=False)


@contextmanager
def dense_form(module: LowBitModule, dtype: torch.dtype) -> Iterator[None]:
    """`module` as a dense layer in `dtype`; afterwards it is what it was, whatever was written into the dense one."""
    original = Original.of(module)
    become_dense(module, dtype)
    try:
        yield
    finally:
        original.restore(module)
