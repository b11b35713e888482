"""Linear layers that are pruned in blocks while their weight is low-bit codes that are trained directly.

Both at once: a trainable low-bit layer (`trainable.py`), whose dead blocks hold code 0 (`masked.py`). The gradient of
dead blocks is zeroed before it is accumulated, so a direct update moves no code there: a step of exactly zero changes
nothing, whatever the noise (functional/stochastic.py). Codes are held dense [N, K] while blocks come and go, with a
scale for each row of each block, which a block keeps while it is dead. Packing gathers the codes and scales of live
blocks as they are: nothing is rounded once more.

Shape legend: W [N, K] in blocks of [bn, bk], mask bool [NB, KB], scales [N, KB].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..configs.scheme import Scheme
from ..functional.block_codes import SCALE_DTYPE
from ..functional.block_masks import clear_dead_, columns_of, gather, scatter
from ..functional.grid import grid_of
from ..functional.packing import pack
from ..functional.rounding import round_to_nearest, to_codes
from ..functional.trainable import trainable_linear
from .masked import MaskedModule
from .packed import PackedWeight
from .trainable import TrainableModule, trainable_forward


class LiveSlot(torch.autograd.Function):
    """A stand-in of the weight's shape, whose numbers nobody reads; backward keeps the gradient of live blocks."""

    @staticmethod
    def forward(ctx, weight: Tensor, module: MaskedCodes) -> Tensor:
        ctx.module = module
        return torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        module = ctx.module
        if module.layout.transposed:
            return module.live_gradient(gradient.t()).t(), None
        return module.live_gradient(gradient), None


class LiveCodes(torch.autograd.Function):
    """The numbers of the live blocks in `dtype`; backward puts their gradients back in place."""

    @staticmethod
    def forward(ctx, weight: Tensor, module: MaskedCodes, dtype: torch.dtype) -> Tensor:
        columns, pointers = module.live_columns()
        ctx.module, ctx.mask, ctx.dtype = module, module.mask, weight.dtype
        return gather(module.oriented(dtype), columns, pointers, module.layout.block)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        layout = ctx.module.layout
        columns, pointers = columns_of(ctx.mask)
        shape = layout.out_features, layout.in_features
        dense = scatter(gradient, columns, pointers, shape, layout.block).to(ctx.dtype)
        return dense.t() if layout.transposed else dense, None, None


class MaskedCodes(MaskedModule, TrainableModule):
    """Mixin of the layers whose codes are trained while blocks of them are pruned."""

    def oriented(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers of the codes as [N, K]: a copy, which writes to nothing."""
        dense = self.dense_weight(dtype)
        return dense.t() if self.layout.transposed else dense

    def dense_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return TrainableModule.dense_weight(self, "weight", dtype)

    def stored_bytes(self) -> int:
        scale = self._parameters["weight_scale"]
        return self.stored().numel() + scale.numel() * scale.element_size()

    def clear(self) -> None:
        codes, stored = self.codes(), self.stored()
        clear_dead_(codes, self.mask, self.layout.block)
        stored.copy_(pack(codes, grid_of(self.form.bits)).view(stored.shape))

    def live_tensors(self, columns: Tensor, pointers: Tensor | None) -> tuple[Tensor, Tensor]:
        layout, grid = self.layout, grid_of(self.form.bits)
        codes = gather(self.codes(), columns, pointers, layout.block)
        scale = self._parameters["weight_scale"].detach()
        # rows that reach over the edge hold zeros, times any positive number
        scale = F.pad(scale, (0, 0, 0, -scale.shape[0] % layout.block[0]), value=1.0)
        by_block = scale.unflatten(0, (-1, layout.block[0])).transpose(1, 2)
        if pointers is None:
            rows = torch.arange(layout.grid[0], device=scale.device)[:, None]
        else:
            rows = torch.arange(layout.grid[0], device=scale.device).repeat_interleave(pointers.diff().long())
        stored = pack(codes.flatten(0, -2), grid).view(*codes.shape[:-1], -1)
        return stored, by_block[rows, columns.long()].contiguous()

    def _product(self, x: Tensor) -> Tensor:
        parameters = self._parameters
        trains = parameters["weight"].requires_grad or parameters["weight_scale"].requires_grad
        if not (self.training and torch.is_grad_enabled() and trains):
            return trainable_forward(self, x)
        return self._training_product(x)

    def _sparse_values(self, x: Tensor) -> Tensor | None:
        # the gradient of a learned scale is formed by the dense product
        if self._parameters["weight_scale"].requires_grad:
            return None
        return LiveCodes.apply(self._parameters["weight"], self, x.dtype)

    def _dense_product(self, x: Tensor) -> Tensor:
        parameters, slot = self._parameters, self._parameters["weight"]
        return trainable_linear(
            x, LiveSlot.apply(slot, self), slot.stored, parameters["weight_scale"], None, parameters["bias"], self.form
        )  # fmt: skip

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if f"{prefix}weight_col_indices" in state_dict:
            raise ValueError(
                f"`{prefix}weight` of the checkpoint holds live blocks only, and the model's is still being pruned. "
                "Load the checkpoint with `from_pretrained`."
            )
        TrainableModule._load_from_state_dict(self, state_dict, prefix, *args)


class MaskedCodesLinear(MaskedCodes, nn.Linear):
    """`nn.Linear` whose codes are trained while blocks of them are pruned."""

    def forward(self, input: Tensor) -> Tensor:
        return self._product(input)


class MaskedCodesConv1D(MaskedCodes, Conv1D):
    """GPT-2's `Conv1D` whose codes are trained while blocks of them are pruned."""

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x)


def code_blocks(
    module: MaskedModule, bits: str | int, group_size: int | str | None
) -> tuple[PackedWeight, dict[str, Tensor]]:
    """Codes of the weight of a masked layer, with a scale for each row of each block: how they are packed, and the
    stored tensors by suffix.

    `group_size` None gives the blocks of a row the scale of the whole row, "tensor" that of the weight, a number one
    of their own. Raises ValueError for NaN or infinity.
    """
    layout, grid, weight = module.layout, grid_of(bits), module.oriented().detach()
    _, width = layout.block
    start = width if isinstance(group_size, int) else group_size
    _, scale, _ = round_to_nearest(weight, grid, start, symmetric=True)
    scale = scale.to(SCALE_DTYPE).expand(layout.out_features, layout.grid[1]).contiguous()
    packed = PackedWeight(Scheme(bits, width, True, "float"), layout.shape, layout.transposed)
    codes = pack(to_codes(weight, grid, scale, None, width).contiguous(), grid)
    return packed, {"": codes.view(packed.tensors()[""][0]), "_scale": scale}
