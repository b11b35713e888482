"""A weight that is being pruned in blocks: dense in memory, exactly zero in dead blocks.

The mask never enters the forward product: dead blocks hold zeros, which whoever trains the weight writes back after
each step of the optimizer (`sparsity/pruner.py`). In the backward pass the gradient of dead blocks is zeroed before it
is accumulated, so that neither clipping nor moments see it; a step at which blocks may grow keeps a dense copy of it
first. Once few enough blocks live, the product and both gradients run on the live blocks alone (`sparse_compute`).

A layer is such a weight itself (`masked.py`); a module of fused experts holds several (`sparse_experts.py`).

Shape legend: W [N, K] in blocks of [bn, bk], mask bool [NB, KB], x [..., K]; all with a leading E for fused experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..configs.blast import BlockLayout
from ..functional.block_codes import quantize_blocks
from ..functional.block_crossover import pays
from ..functional.block_dispatch import BlockProblem
from ..functional.block_masks import clear_dead, clear_dead_, columns_of, gather, is_clear, live_mask, mask_of, scatter


class LiveGradient(torch.autograd.Function):
    """The weight [..., N, K] as it is; backward keeps the gradient of live blocks only."""

    @staticmethod
    def forward(ctx, weight: Tensor, masked: MaskedWeight) -> Tensor:
        ctx.masked = masked
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.masked.live_gradient(gradient), None


class LiveBlocks(torch.autograd.Function):
    """The values of the live blocks of a weight [..., N, K]; backward puts their gradients back in place."""

    @staticmethod
    def forward(ctx, weight: Tensor, masked: MaskedWeight) -> Tensor:
        columns, pointers = masked.live_columns()
        ctx.masked, ctx.mask, ctx.shape = masked, masked.mask, tuple(weight.shape)
        return gather(weight, columns, pointers, masked.layout.block)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        columns, pointers = columns_of(ctx.mask)
        return scatter(gradient, columns, pointers, ctx.shape, ctx.masked.layout.block), None


class MaskedWeight:
    """`layout` says how it is pruned, `mask` what lives, `target` how sparse it will be in the end.

    `mask_group` names what weights with one mask in common belong to; None: it has a mask of its own. `controlled` is
    True while something keeps dead blocks at zero; training without is refused. `sparse_compute`: train on live blocks
    alone, True, False, or "auto": where that was measured to be no slower (functional/block_crossover.py).
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
    # sum over rows of x^2, float32 [..., K + 1]; the last one counts the rows
    input_squares: Tensor | None = None
    _columns: tuple[Tensor, Tensor, Tensor | None] | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The tensor that is trained, in the model's orientation."""
        raise NotImplementedError

    def oriented(self) -> Tensor:
        """The weight as [..., N, K], a view."""
        return self.parameter.transpose(-1, -2) if self.layout.transposed else self.parameter

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
        return self.parameter.detach().to(dtype)

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
        return self.parameter.numel() * self.parameter.element_size()

    def live_gradient(self, gradient: Tensor) -> Tensor:
        """What of the gradient [..., N, K] of this pass is accumulated; all of it is kept where blocks may grow."""
        if self.wants_dense_gradient:
            seen = self.dense_gradient
            self.dense_gradient = gradient.detach() if seen is None else seen + gradient.detach()
        return clear_dead(gradient, self.mask, self.layout.block)

    def live_tensors(self, columns: Tensor, pointers: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What is stored of the live blocks: values, or packed codes and their scales in the layout's bits."""
        values = gather(self.oriented().detach(), columns, pointers, self.layout.block).contiguous()
        return (values, None) if self.layout.bits is None else quantize_blocks(values, self.layout.bits)

    def refuse_uncontrolled(self) -> None:
        """Raise RuntimeError when nothing prunes the weight that is about to be trained."""
        if not self.controlled:
            raise RuntimeError(
                "a block-sparse weight is trained, but nothing prunes it: pass "
                "`callbacks=[hf_lowbit.BlastCallback()]` to the Trainer (in a loop of your own, use "
                "`hf_lowbit.sparsity.pruner.BlockPruner`), or freeze the weights that are not to be trained."
            )

    def collect(self, squares: Tensor) -> None:
        """Add to `input_squares`."""
        self.input_squares = squares if self.input_squares is None else self.input_squares + squares

    def computes_sparse(self, x: Tensor, rows: int) -> bool:
        """Whether `rows` of x are to be multiplied with live blocks alone in this step of training."""
        if self.wants_dense_gradient:
            return False
        if self.sparse_compute != "auto":
            return self.sparse_compute
        layout, device = self.layout, x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        problem = BlockProblem(
            *layout.block, layout.grid[0], layout.in_features, rows, dtype, device, sparsity=self.measured_live()
        )
        return pays("training", problem)

    def measured_live(self) -> float:
        """`measured_sparsity` by the columns that are kept, without a look at the mask."""
        return 1 - self.live_columns()[0].numel() / self.mask.numel()

    def follow_device(self) -> None:
        """Bring the mask to where the weight is."""
        mask, device = self.__dict__.get("mask"), self.parameter.device
        if mask is not None and mask.device != device:
            self.mask = mask.to(device)

    def load_packed(self, state_dict: dict, name: str) -> dict:
        """`state_dict` as it is; or, where `name` holds live blocks, with the dense weight in their place: a Trainer's
        last save may be packed. The mask is theirs then."""
        columns = state_dict.get(f"{name}_col_indices")
        if f"{name}_scale" in state_dict:
            raise ValueError(f"`{name}` of the checkpoint holds low-bit blocks, which can't be pruned further.")
        if columns is None:
            return state_dict
        layout = self.layout
        values, pointers = state_dict[name], state_dict.get(f"{name}_row_pointers")
        dense = scatter(values, columns, pointers, layout.oriented_shape, layout.block)
        self.mask = mask_of(columns, pointers, layout.mask_shape).to(self.parameter.device)
        kept = {k: v for k, v in state_dict.items() if k not in (f"{name}_col_indices", f"{name}_row_pointers")}
        return {**kept, name: dense.transpose(-1, -2).contiguous() if layout.transposed else dense}
