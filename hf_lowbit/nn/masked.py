"""Linear layers whose weight is being pruned in blocks (`masked_weight.py`): `nn.Linear` and GPT-2's `Conv1D`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..configs.blast import BlockLayout
from ..functional.blocks import block_linear
from .masked_weight import LiveBlocks, LiveGradient, MaskedWeight


def sparse_product(
    x: Tensor, values: Tensor, columns: Tensor, pointers: Tensor | None, bias: Tensor | None, layout: BlockLayout
) -> Tensor:
    """x [..., K] -> [..., N] on live blocks; what blocks reach over the edge is cut off."""
    if layout.out_features % layout.block[0] == 0:
        return block_linear(x, values, columns, bias, layout.in_features, pointers)
    return within_edge(block_linear(x, values, columns, None, layout.in_features, pointers), bias, layout)


def within_edge(y: Tensor, bias: Tensor | None, layout: BlockLayout) -> Tensor:
    """y [..., NB * bn] without what blocks reach over the edge, plus bias [N]."""
    if y.shape[-1] != layout.out_features:
        y = y[..., : layout.out_features]
    return y if bias is None else y + bias.to(y.dtype)


class MaskedModule(MaskedWeight, nn.Module):
    """Mixin of the layers that are being pruned."""

    @property
    def parameter(self) -> nn.Parameter:
        return self._parameters["weight"]

    def _product(self, x: Tensor) -> Tensor:
        weight = self.oriented()
        if not (self.training and torch.is_grad_enabled() and weight.requires_grad):
            return F.linear(x, weight, self._parameters["bias"])
        return self._training_product(x)

    def _sparse_values(self, x: Tensor) -> Tensor | None:
        """The live blocks, differentiable, for the product with `x`; None where only the dense one will do."""
        return LiveBlocks.apply(self.oriented(), self)

    def _dense_product(self, x: Tensor) -> Tensor:
        return F.linear(x, LiveGradient.apply(self.oriented(), self), self._parameters["bias"])

    @torch.compiler.disable
    def _training_product(self, x: Tensor) -> Tensor:
        self.refuse_uncontrolled()
        if self.collects_inputs:
            rows = x.detach().reshape(-1, x.shape[-1]).to(torch.float32)
            self.collect(torch.cat([rows.square().sum(0), rows.new_tensor([float(len(rows))])]))
        wants_sparse = self.computes_sparse(x, x.numel() // max(x.shape[-1], 1))
        values = self._sparse_values(x) if wants_sparse else None
        if values is None:
            return self._dense_product(x)
        return sparse_product(x, values, *self.live_columns(), self._parameters["bias"], self.layout)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.follow_device()
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args):
        super()._load_from_state_dict(self.load_packed(state_dict, f"{prefix}weight"), prefix, *args)

    def extra_repr(self) -> str:
        rows, columns = self.layout.block
        own = f"blocks={rows}x{columns}, target={self.target}"
        return ", ".join(part for part in (super().extra_repr(), own) if part)


class MaskedLinear(MaskedModule, nn.Linear):
    """`nn.Linear` that is being pruned."""

    def forward(self, input: Tensor) -> Tensor:
        return self._product(input)


class MaskedConv1D(MaskedModule, Conv1D):
    """GPT-2's `Conv1D` that is being pruned; its blocks are those of the transposed weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x)
