"""Linear layers whose weight is being pruned in blocks: dense in memory, exactly zero in dead blocks.

The mask never enters the forward product: dead blocks hold zeros, which whoever trains the layer writes back after
each step of the optimizer (`sparsity/pruner.py`). In the backward pass the gradient of dead blocks is zeroed before it
is accumulated, so that neither clipping nor moments see it; a step at which blocks may grow keeps a dense copy of it
first. Once few enough blocks live, the product and both gradients run on the live blocks alone (`sparse_compute`).

Shape legend: W [N, K] in blocks of [bn, bk], mask bool [NB, KB], x [..., K].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..configs.blast import BlockLayout
from ..functional.block_codes import quantize_blocks
from ..functional.block_crossover import pays
from ..functional.block_dispatch import BlockProblem
from ..functional.block_masks import block_view, clear_dead, clear_dead_, columns_of, is_clear, live_mask, mask_of
from ..functional.blocks import block_linear, gather_blocks, scatter_blocks


class LiveGradient(torch.autograd.Function):
    """The weight [N, K] as it is; backward keeps the gradient of live blocks only."""

    @staticmethod
    def forward(ctx, weight: Tensor, module: MaskedModule) -> Tensor:
        ctx.module = module
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.module.live_gradient(gradient), None


class LiveBlocks(torch.autograd.Function):
    """The values of the live blocks of a weight [N, K]; backward puts their gradients back in place."""

    @staticmethod
    def forward(ctx, weight: Tensor, module: MaskedModule) -> Tensor:
        columns, pointers = module.live_columns()
        ctx.module, ctx.mask, ctx.shape = module, module.mask, tuple(weight.shape)
        return gather(weight, columns, pointers, module.layout.block)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        columns, pointers = columns_of(ctx.mask)
        return scatter(gradient, columns, pointers, ctx.shape, ctx.module.layout.block), None


def gather(dense: Tensor, columns: Tensor, pointers: Tensor | None, block: tuple[int, int]) -> Tensor:
    """Live blocks of `dense` [N, K]: [NB, L, bn, bk], or [nnz, bn, bk] with row pointers."""
    if pointers is None:
        return gather_blocks(dense, columns, block)
    view = block_view(dense, block)
    rows = torch.arange(view.shape[0], device=dense.device).repeat_interleave(pointers.diff().long())
    return view.transpose(1, 2)[rows, columns.long()]


def scatter(
    values: Tensor, columns: Tensor, pointers: Tensor | None, shape: tuple[int, int], block: tuple[int, int]
) -> Tensor:
    """The reverse of `gather`: dense [N, K] with zeros elsewhere."""
    if pointers is None:
        return scatter_blocks(values, columns, shape)
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    rows = torch.arange(grid[0], device=values.device).repeat_interleave(pointers.diff().long())
    dense = values.new_zeros(*grid, *block)
    dense[rows, columns.long()] = values
    return dense.transpose(1, 2).flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]].contiguous()


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


class MaskedModule(nn.Module):
    """Mixin of the layers that are being pruned; `layout` says how, `mask` what lives, `target` how sparse in the end.

    `mask_group` names what layers with one mask in common belong to; None: a layer has a mask of its own.
    `controlled` is True while something keeps dead blocks at zero; training without is refused. `sparse_compute`:
    train on live blocks alone, True, False, or "auto": where that was measured to be no slower
    (functional/block_crossover.py).
    """

    layout: BlockLayout
    target: float
    mask: Tensor
    mask_group: str | None = None
    controlled: bool = False
    sparse_compute: bool | str = False
    wants_dense_gradient: bool = False
    dense_gradient: Tensor | None = None
    collects_inputs: bool = False
    # sum over rows of x^2, float32 [K + 1]; the last one counts the rows
    input_squares: Tensor | None = None
    _columns: tuple[Tensor, Tensor, Tensor | None] | None = None

    def oriented(self) -> Tensor:
        """The weight as [N, K], a view."""
        weight = self._parameters["weight"]
        return weight.t() if self.layout.transposed else weight

    def live_columns(self) -> tuple[Tensor, Tensor | None]:
        """`columns_of` the mask, kept until the mask is another."""
        if self._columns is None or self._columns[0] is not self.mask:
            self._columns = (self.mask, *columns_of(self.mask))
        return self._columns[1:]

    @property
    def measured_sparsity(self) -> float:
        """Share of dead blocks."""
        return 1 - int(self.mask.sum()) / self.mask.numel()

    def dense_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight in the dense shape and orientation."""
        return self._parameters["weight"].detach().to(dtype)

    def use_mask(self, mask: Tensor | None = None) -> None:
        """Take `mask`; None: the blocks that hold anything, or all of them when the weight has never been pruned."""
        self.mask = live_mask(self.oriented(), self.layout.block) if mask is None else mask

    def mask_holds(self) -> bool:
        """Whether dead blocks are zero."""
        return is_clear(self.oriented(), self.mask, self.layout.block)

    def clear(self) -> None:
        """Zero the dead blocks, in place."""
        with torch.no_grad():
            clear_dead_(self.oriented(), self.mask, self.layout.block)

    def stored_bytes(self) -> int:
        """Bytes of the weight while it is being pruned."""
        weight = self._parameters["weight"]
        return weight.numel() * weight.element_size()

    def live_gradient(self, gradient: Tensor) -> Tensor:
        """What of the gradient [N, K] of this pass is accumulated; all of it is kept where blocks may grow."""
        if self.wants_dense_gradient:
            seen = self.dense_gradient
            self.dense_gradient = gradient.detach() if seen is None else seen + gradient.detach()
        return clear_dead(gradient, self.mask, self.layout.block)

    def live_tensors(self, columns: Tensor, pointers: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What is stored of the live blocks: values, or packed codes and their scales in the layout's bits."""
        values = gather(self.oriented().detach(), columns, pointers, self.layout.block).contiguous()
        return (values, None) if self.layout.bits is None else quantize_blocks(values, self.layout.bits)

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
        if not self.controlled:
            raise RuntimeError(
                "a block-sparse weight is trained, but nothing prunes it: pass "
                "`callbacks=[hf_lowbit.BlastCallback()]` to the Trainer (in a loop of your own, use "
                "`hf_lowbit.sparsity.pruner.BlockPruner`), or freeze the weights that are not to be trained."
            )
        if self.collects_inputs:
            rows = x.detach().reshape(-1, x.shape[-1]).to(torch.float32)
            squares = torch.cat([rows.square().sum(0), rows.new_tensor([float(len(rows))])])
            self.input_squares = squares if self.input_squares is None else self.input_squares + squares
        wants_sparse = not self.wants_dense_gradient and self._computes_sparse(x)
        values = self._sparse_values(x) if wants_sparse else None
        if values is None:
            return self._dense_product(x)
        return sparse_product(x, values, *self.live_columns(), self._parameters["bias"], self.layout)

    def _computes_sparse(self, x: Tensor) -> bool:
        if self.sparse_compute != "auto":
            return self.sparse_compute
        layout, device, rows = self.layout, x.device.type, x.numel() // max(x.shape[-1], 1)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        sparsity = 1 - self.live_columns()[0].numel() / self.mask.numel()
        problem = BlockProblem(
            *layout.block, layout.grid[0], layout.in_features, rows, dtype, device, sparsity=sparsity
        )
        return pays("training", problem)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        mask = self.__dict__.get("mask")
        if mask is not None and mask.device != self._parameters["weight"].device:
            self.mask = mask.to(self._parameters["weight"].device)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # a file of packed blocks fits too: a Trainer's last save may be one
        columns = state_dict.get(f"{prefix}weight_col_indices")
        if f"{prefix}weight_scale" in state_dict:
            raise ValueError(
                f"`{prefix}weight` of the checkpoint holds low-bit blocks, which can't be pruned further."
            )
        if columns is not None:
            values, pointers = state_dict[f"{prefix}weight"], state_dict.get(f"{prefix}weight_row_pointers")
            shape = self.layout.out_features, self.layout.in_features
            dense = scatter(values, columns, pointers, shape, self.layout.block)
            state_dict = {k: v for k, v in state_dict.items() if not k.startswith(f"{prefix}weight")}
            state_dict[f"{prefix}weight"] = dense.t().contiguous() if self.layout.transposed else dense
            self.mask = mask_of(columns, pointers, self.layout.grid).to(self._parameters["weight"].device)
        super()._load_from_state_dict(state_dict, prefix, *args)

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
