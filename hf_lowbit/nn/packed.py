"""What every low-bit layer shares: packed weights held as plain Parameters, whose codes and scales `.to(dtype)` leaves
alone.

A weight named `w` is stored as three tensors of the same module (docs/format.md): `w` int8 codes, `w_scale`, and
`w_zero_point` on asymmetric grids. They are Parameters without gradient, not buffers: DDP re-broadcasts buffers in
every forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..configs.dense_shape import DenseShape
from ..configs.scheme import Scheme
from ..functional.grid import grid_of, group_count
from ..functional.packing import pack, row_bytes, unpack
from ..functional.rounding import round_to_nearest, scale_dtype
from ..functional.rows import rows_of
from .loaded import LoadedModule


@dataclass(frozen=True)
class PackedWeight(DenseShape):
    """How one parameter of a module is packed.

    `shape` is the dense shape as the model defines it: [N, K], [K, N] (`transposed`), or with a leading E for experts.
    `product` are the arguments of `functional.linear.linear` after the bias, which every call of a layer needs.
    """

    scheme: Scheme
    shape: tuple[int, ...]
    transposed: bool = False

    def __post_init__(self):
        scheme = self.scheme
        product = scheme.bits, self.in_features, scheme.block, scheme.activations == "int8"
        object.__setattr__(self, "product", product)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each stored tensor by suffix: "" (codes), "_scale" and, if asymmetric, "_zero_point"."""
        grid = grid_of(self.scheme.bits)
        per_tensor = self.scheme.group_size == "tensor"
        groups = 1 if per_tensor else group_count(self.in_features, self.scheme.block)
        scales = (*self.experts, 1 if per_tensor else self.out_features, groups)
        tensors = {
            "": ((*self.experts, 1, self.out_features, row_bytes(self.in_features, grid)), torch.int8),
            "_scale": (scales, scale_dtype(self.scheme.group_size, self.scheme.scales)),
        }
        if not self.scheme.symmetric:
            tensors["_zero_point"] = (scales, torch.int8)
        return tensors

    def bytes(self) -> int:
        """Bytes of the stored tensors."""
        total = 0
        for shape, dtype in self.tensors().values():
            count = dtype.itemsize
            for size in shape:
                count *= size
            total += count
        return total


def quantize_weight(weight: Tensor, packed: PackedWeight) -> dict[str, Tensor]:
    """Round a dense `weight` (shape `packed.shape`) and pack it. Returns the stored tensors by suffix, never changes
    `weight`.

    Experts are rounded one after the other, so that the float32 working copy is that of one expert.
    """
    if tuple(weight.shape) != packed.shape:
        raise ValueError(f"the weight has shape {tuple(weight.shape)}, the model's is {packed.shape}")
    weight = weight.detach()
    oriented = weight.transpose(-1, -2) if packed.transposed else weight
    matrices = oriented if packed.experts else oriented.unsqueeze(0)
    stored = {s: torch.empty(shape, dtype=d, device=weight.device) for s, (shape, d) in packed.tensors().items()}
    grid = grid_of(packed.scheme.bits)
    for index, matrix in enumerate(matrices):
        codes, scale, zero_point = round_to_nearest(
            matrix,
            grid,
            packed.scheme.group_size,
            symmetric=packed.scheme.symmetric,
            scales=packed.scheme.scales,
        )
        parts = {"": pack(codes, grid), "_scale": scale, "_zero_point": zero_point}
        for suffix, tensor in stored.items():
            target = tensor[index] if packed.experts else tensor
            target.copy_(parts[suffix].view(target.shape))
    return stored


def dense_rows(packed: PackedWeight, stored: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype):
    """The numbers of stored tensors, in storage orientation: [N, K], or [E, N, K] for any number E of experts."""
    bits, in_features, block = packed.product[:3]
    lead = stored.shape[:-3]
    flat = stored.reshape(-1, stored.shape[-1])
    if lead:
        # experts have scales of their own, also where one serves a whole expert
        scale, zero_point = (
            None if t is None else t.expand(*lead, packed.out_features, t.shape[-1]).reshape(-1, t.shape[-1])
            for t in (scale, zero_point)
        )
    return rows_of(flat, scale, zero_point, None, bits, in_features, block, dtype).view(
        *lead, packed.out_features, in_features
    )


class LowBitModule(LoadedModule):
    """Mixin of the low-bit layers. `lowbit` maps each packed parameter's name to its `PackedWeight`."""

    lowbit: dict[str, PackedWeight]

    def companions(self) -> list[str]:
        """Names of the scales and zero points."""
        return [name + suffix for name, packed in self.lowbit.items() for suffix in packed.tensors() if suffix]

    def stored(self, name: str = "weight") -> Tensor:
        """The packed bytes of parameter `name`."""
        return self._parameters[name].detach()

    def codes(self, name: str = "weight") -> Tensor:
        """Signed codes int8 [N, K] (with a leading E for experts), in storage orientation."""
        packed = self.lowbit[name]
        codes = unpack(self.stored(name), grid_of(packed.scheme.bits), packed.in_features)
        return codes.view(*packed.experts, packed.out_features, packed.in_features)

    def dense_weight(self, name: str = "weight", dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers the codes stand for, in the dense shape and orientation."""
        packed = self.lowbit[name]
        parts = (self._parameters.get(name + suffix) for suffix in ("", "_scale", "_zero_point"))
        dense = dense_rows(packed, *(None if part is None else part.detach() for part in parts), dtype)
        return dense.transpose(-1, -2).contiguous() if packed.transposed else dense

    def _apply(self, fn, recurse=True):
        # `.to(dtype)` and `.half()` convert every floating parameter, `.type()` all: ours keep their documented dtypes
        stored = (p + suffix for p, packed in self.lowbit.items() for suffix in packed.tensors())
        before = {name: self._parameters[name] for name in stored if self._parameters.get(name) is not None}
        # a weight that waits to be rounded is still dense, and converts like any other
        before = {name: t.detach() for name, t in before.items() if name not in self.lowbit or t.dtype == torch.int8}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            after = self._parameters[name]
            if after.dtype != tensor.dtype:
                # in place: a tied module holds the same Parameter
                after.data = tensor.to(after.device)
        return self

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        # copying would convert: floats under the name of codes become codes without a word
        for name, packed in self.lowbit.items():
            for suffix, (_, dtype) in packed.tensors().items():
                given = state_dict.get(prefix + name + suffix)
                if given is not None and given.dtype != dtype:
                    errors.append(f"`{prefix}{name}{suffix}` must be {dtype}, got {given.dtype}.")
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        schemes = ", ".join(
            f"bits={p.scheme.bits}, group_size={p.scheme.group_size}, symmetric={p.scheme.symmetric}, "
            f"activations={p.scheme.activations}"
            for p in list(self.lowbit.values())[:1]
        )
        return ", ".join(part for part in (super().extra_repr(), schemes) if part)


def install(
    module: LowBitModule, name: str, packed: PackedWeight, stored: dict[str, Tensor] | None, device=None
) -> None:
    """Put packed tensors in the place of parameter `name`; with `stored` None, empty ones on `device` to load into."""
    for suffix, (shape, dtype) in packed.tensors().items():
        tensor = torch.empty(shape, dtype=dtype, device=device) if stored is None else stored[suffix]
        module.register_parameter(name + suffix, nn.Parameter(tensor, requires_grad=False))
    if "_zero_point" not in packed.tensors():
        module.register_parameter(f"{name}_zero_point", None)
    module.lowbit = {**module.__dict__.get("lowbit", {}), name: packed}


def remove(module: LowBitModule, name: str, dense: nn.Parameter) -> None:
    """The reverse of `install`: parameter `name` becomes `dense`, and the companions go."""
    for suffix in ("_scale", "_zero_point"):
        module._parameters.pop(name + suffix, None)
    module.register_parameter(name, dense)
    module.lowbit = {key: value for key, value in module.lowbit.items() if key != name}
