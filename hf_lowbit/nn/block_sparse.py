"""Linear layers that hold the live blocks of their weight and nothing else.

`weight` are the values: [NB, L, bn, bk] where every block row has L live blocks, else [nnz, bn, bk];
`weight_col_indices` int32 [NB, L] or [nnz] are their block columns, ascending within a row, and `weight_row_pointers`
int32 [NB + 1] says where rows begin in the second case. Values take gradients like any weight; the mask stays.

With low-bit blocks (`layout.bits`) `weight` holds packed codes instead, int8 [..., bn, R], and `weight_scale` bfloat16
[..., bn] their scales (functional/block_codes.py). They are multiplied as they lie (functional/block_code_linear.py),
with float or int8 activations (`layout.activations`), and take no gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..configs.blast import BlockLayout
from ..functional.block_code_linear import block_code_linear
from ..functional.block_codes import SCALE_DTYPE, dequantize_blocks, stored_width
from ..functional.block_dispatch import BlockProblem
from ..functional.block_masks import mask_of, scatter
from .loaded import LoadedModule
from .masked import sparse_product, within_edge


SUFFIXES = ("", "_scale", "_col_indices", "_row_pointers")


class BlockWeight:
    """A weight of which the live blocks are held; `layout` says what the tensors are. A layer is one itself; a module
    of fused experts holds several (`sparse_experts.py`)."""

    layout: BlockLayout

    def held(self, suffix: str = "") -> Tensor | None:
        """The stored tensor of `suffix`, one of `SUFFIXES`; None where the layout has none."""
        raise NotImplementedError

    def values(self, dtype: torch.dtype) -> Tensor:
        """The live blocks: the parameter itself, or the numbers of its codes in `dtype`."""
        stored, bits = self.held(), self.layout.bits
        if bits is None:
            return stored
        return dequantize_blocks(stored, self.held("_scale"), bits, self.layout.block[1], dtype)

    @property
    def mask(self) -> Tensor:
        """Which blocks live, bool [..., NB, KB]."""
        columns, pointers = self.held("_col_indices"), self.held("_row_pointers")
        return mask_of(columns.detach(), None if pointers is None else pointers.detach(), self.layout.mask_shape)

    @property
    def measured_sparsity(self) -> float:
        """Share of dead blocks."""
        return self.layout.sparsity

    def problem(self, rows: int, dtype: torch.dtype) -> BlockProblem:
        """The product the weight (of one expert) takes part in, for `rows` tokens of `dtype`."""
        layout = self.layout
        return BlockProblem(
            *layout.block, layout.grid[0], layout.in_features, rows, dtype, self.held().device.type,
            layout.bits, layout.activations == "int8", layout.sparsity,
        )  # fmt: skip

    def stored_bytes(self) -> int:
        """Bytes of values, scales and indices."""
        tensors = [self.held(suffix) for suffix in SUFFIXES]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def stack(self, dtype: torch.dtype) -> Tensor:
        """The weight in the dense shape and orientation, differentiable where the blocks are float."""
        columns, pointers = self.held("_col_indices"), self.held("_row_pointers")
        values = self.values(dtype).to(dtype)
        dense = scatter(values, columns, pointers, self.layout.oriented_shape, self.layout.block)
        return dense.transpose(-1, -2).contiguous() if self.layout.transposed else dense

    def dense_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight in the dense shape and orientation, zeros in dead blocks."""
        return self.stack(dtype).detach()


class BlockModule(BlockWeight, LoadedModule):
    """Mixin of the block-sparse layers."""

    def held(self, suffix: str = "") -> Tensor | None:
        return self._parameters.get("weight" + suffix)

    def _product(self, x: Tensor) -> Tensor:
        parameters, layout = self._parameters, self.layout
        values, columns, pointers = (parameters.get("weight" + suffix) for suffix in ("", *SUFFIXES[2:]))
        if layout.bits is None:
            return sparse_product(x, values, columns, pointers, parameters["bias"], layout)
        y = block_code_linear(
            x, values, parameters["weight_scale"], columns, None, layout.in_features, layout.bits, layout.block[1],
            pointers, layout.activations == "int8",
        )  # fmt: skip
        return within_edge(y, parameters["bias"], layout)

    def _apply(self, fn, recurse=True):
        scale = self._parameters.get("weight_scale")
        super()._apply(fn, recurse)
        keep_scale_dtype(self, "weight_scale", scale)
        return self

    def extra_repr(self) -> str:
        rows, columns = self.layout.block
        own = f"blocks={rows}x{columns}, sparsity={self.layout.sparsity:.4f}"
        if self.layout.bits is not None:
            own += f", bits={self.layout.bits}, activations={self.layout.activations}"
        return ", ".join(part for part in (super().extra_repr(), own) if part)


def keep_scale_dtype(module: nn.Module, name: str, before: Tensor | None) -> None:
    """Undo what `.to(dtype)`, which converts every floating parameter, did to scales: they keep their documented
    dtype."""
    moved = module._parameters.get(name)
    if moved is not None and moved.dtype != SCALE_DTYPE:
        moved.data = before.detach().to(device=moved.device, dtype=SCALE_DTYPE)


def block_tensors(layout: BlockLayout) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Shape and dtype of each stored tensor by suffix; the values have the model's dtype (None)."""
    rows, columns = layout.block
    kept = (*layout.mask_shape[:-1], layout.live) if layout.balance == "row" else (layout.live,)
    tensors = {"": ((*kept, rows, columns), None), "_col_indices": (kept, torch.int32)}
    if layout.bits is not None:
        tensors[""] = ((*kept, rows, stored_width(columns, layout.bits)), torch.int8)
        tensors["_scale"] = ((*kept, rows), SCALE_DTYPE)
    if layout.balance != "row":
        tensors["_row_pointers"] = ((math.prod(layout.mask_shape[:-1]) + 1,), torch.int32)
    return tensors


class BlockSparseLinear(BlockModule, nn.Linear):
    """`nn.Linear` with live blocks only. A subclass, since PEFT and transformers look for it."""

    def forward(self, input: Tensor) -> Tensor:
        return self._product(input)


class BlockSparseConv1D(BlockModule, Conv1D):
    """GPT-2's `Conv1D` with live blocks only, stored as a linear layer's."""

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x)
