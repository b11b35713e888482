"""Fused experts that are block-sparse: 3-D parameters ([E, N, K], or [E, K, N]) each of whose experts is a matrix in
blocks, with a mask of its own and the same number of live blocks as the others.

A module of experts holds one or several such stacks. While they are pruned (`MaskedStack`) the parameters stay dense,
and the module's own forward runs as its config dispatches it (eager, grouped_mm, batched_mm), on parameters whose
gradient is zero in dead blocks. On live blocks alone (`BlockStack`, and training once it pays) tokens are sorted by
expert, and each expert's are multiplied with its blocks (functional/block_experts.py).

Modules that do not follow transformers' experts interface see a dense stack, made anew for each forward, under the
parameter's name.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..configs.blast import BlockLayout
from ..functional.block_experts import block_code_experts, block_experts
from ..functional.experts import segments
from .block_sparse import BlockWeight, keep_scale_dtype
from .experts import RoutedExperts
from .loaded import LoadedModule
from .masked import within_edge
from .masked_weight import LiveBlocks, LiveGradient, MaskedWeight


# what a module's own forward has read of its stacks; None outside of one
_reading: ContextVar[dict | None] = ContextVar("hf_lowbit_sparse_experts", default=None)


class MaskedStack(MaskedWeight):
    """Parameter `name` of the experts module `owner`, which is being pruned."""

    def __init__(self, owner: SparseExperts, name: str, layout: BlockLayout, target: float, mask: Tensor):
        self.owner, self.name, self.layout, self.target, self.mask = owner, name, layout, target, mask

    @property
    def parameter(self) -> nn.Parameter:
        return self.owner._parameters[self.name]

    weight = parameter

    @property
    def trains(self) -> bool:
        """Whether a forward now is one of training."""
        return self.owner.training and torch.is_grad_enabled() and self.parameter.requires_grad

    def live(self) -> Tensor:
        """The weight [E, N, K], whose gradient is zero in dead blocks."""
        return LiveGradient.apply(self.oriented(), self) if self.trains else self.oriented()

    def read(self, dtype: torch.dtype) -> Tensor:
        """The dense stack in the model's orientation, for the module's own forward."""
        live = self.live()
        return live.transpose(-1, -2) if self.layout.transposed else live

    def product(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [S, K] sorted by expert -> [S, N]."""
        if not self.trains:
            return dense_experts(x, offsets, self.oriented())
        if self.collects_inputs:
            rows = x.detach().to(torch.float32).square()
            self.collect(by_expert(F.pad(rows, (0, 1), value=1.0), offsets))
        if not self.computes_sparse(x, x.shape[0] // len(self.mask)):
            return dense_experts(x, offsets, self.live())
        values = LiveBlocks.apply(self.oriented(), self)
        return within_edge(
            block_experts(x, offsets, values, *self.live_columns(), self.layout.in_features), None, self.layout
        )


class BlockStack(BlockWeight):
    """Parameter `name` of the experts module `owner`, of which the live blocks are held."""

    def __init__(self, owner: SparseExperts, name: str, layout: BlockLayout):
        self.owner, self.name, self.layout = owner, name, layout

    def held(self, suffix: str = "") -> Tensor | None:
        return self.owner._parameters.get(self.name + suffix)

    def read(self, dtype: torch.dtype) -> Tensor:
        """The dense stack in the model's orientation, for the module's own forward."""
        return self.stack(dtype if self.layout.bits is not None else self.held().dtype)

    def product(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [S, K] sorted by expert -> [S, N]."""
        layout, where = self.layout, (self.held("_col_indices"), self.held("_row_pointers"))
        if layout.bits is None:
            y = block_experts(x, offsets, self.held(), *where, layout.in_features)
        else:
            y = block_code_experts(
                x, offsets, self.held(), self.held("_scale"), *where, layout.in_features, layout.bits,
                layout.block[1], layout.activations == "int8",
            )  # fmt: skip
        return within_edge(y, None, layout)


class SparseExperts(RoutedExperts, LoadedModule):
    """Mixin put in front of an experts class by `classes.lowbit_class`. `stacks` maps the name of each block-sparse
    parameter to what it is."""

    stacks: dict[str, MaskedStack | BlockStack]

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        if any(isinstance(stack, MaskedStack) and stack.trains for stack in self.stacks.values()):
            return self._training_forward(hidden_states, *args, **kwargs)
        if not self.holds_blocks:
            return super().forward(hidden_states, *args, **kwargs)
        if self._is_routed(args, kwargs):
            return self._forward_by_expert(hidden_states, *args)
        return self._own_forward(hidden_states, *args, **kwargs)

    @property
    def holds_blocks(self) -> bool:
        """Whether a stack has no dense form left."""
        return any(isinstance(stack, BlockStack) for stack in self.stacks.values())

    def _is_routed(self, args: tuple, kwargs: dict) -> bool:
        return len(args) == 2 and not kwargs and self.first_projection in self._parameters

    @torch.compiler.disable
    def _training_forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        masked = [s for s in self.stacks.values() if isinstance(s, MaskedStack) and s.trains]
        for stack in masked:
            stack.refuse_uncontrolled()
        routed, collects = self._is_routed(args, kwargs), any(stack.collects_inputs for stack in masked)
        if collects and not routed:
            raise ValueError(
                f'`score`="act" needs the inputs of each expert, and {type(self).__name__} does not follow '
                'transformers\' experts interface: use `score`="fro" or "l1", or leave its experts out by '
                "`modules_to_not_convert`."
            )
        pairs = args[0].numel() if routed else 0
        sparse = routed and any(stack.computes_sparse(x, pairs // len(stack.mask)) for stack in masked)
        if routed and (sparse or collects or self.holds_blocks):
            return self._forward_by_expert(x, *args)
        return self._own_forward(x, *args, **kwargs)

    @torch.compiler.disable
    def _own_forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        token = _reading.set({"dtype": hidden_states.dtype})
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            _reading.reset(token)

    def _project(self, x: Tensor, name: str, offsets: Tensor) -> Tensor:
        stack = self.stacks.get(name)
        if stack is not None:
            y = stack.product(x, offsets)
        else:
            weight = self._parameters[name]
            y = dense_experts(x, offsets, weight.transpose(-1, -2) if self.is_transposed else weight)
        bias = self._parameters.get(f"{name}_bias") if self.has_bias else None
        return y if bias is None else y + of_experts(bias, offsets, len(x)).to(y.dtype)

    def _apply(self, fn, recurse=True):
        scales = {name: self._parameters.get(f"{name}_scale") for name in self.stacks}
        super()._apply(fn, recurse)
        for name, stack in self.stacks.items():
            if isinstance(stack, MaskedStack):
                stack.follow_device()
            else:
                keep_scale_dtype(self, f"{name}_scale", scales[name])
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for name, stack in self.stacks.items():
            if isinstance(stack, MaskedStack):
                state_dict = stack.load_packed(state_dict, prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        for name, stack in self.stacks.items():
            rows, columns = stack.layout.block
            parts.append(f"{name}: blocks={rows}x{columns}, sparsity={stack.measured_sparsity:.4f}")
        return ", ".join(part for part in parts if part)


def sparse_property(name: str) -> property:
    """A parameter's name on an experts class: the parameter, but for the module's own forward a dense stack."""

    def read(self):
        if torch.compiler.is_compiling():
            # what reads dense stacks is never traced, and nothing can trace a ContextVar
            return self._parameters[name]
        seen, stack = _reading.get(), self.__dict__.get("stacks", {}).get(name)
        if seen is None or stack is None:
            return self._parameters[name]
        if (id(self), name) not in seen:
            seen[id(self), name] = stack.read(seen["dtype"])
        return seen[id(self), name]

    return property(read)


def dense_experts(x: Tensor, offsets: Tensor, weight: Tensor) -> Tensor:
    """y [S, N] of x [S, K] sorted by expert and dense weights [E, N, K]; rows of no expert give zeros."""
    matrices = weight.unbind(0)
    y = [F.linear(x[own], matrices[expert]) for expert, own in segments(offsets)]
    first, last = int(offsets[0]), int(offsets[-1])
    dtype = y[0].dtype if y else x.dtype
    before, after = (x.new_zeros(count, weight.shape[1], dtype=dtype) for count in (first, x.shape[0] - last))
    return torch.cat([before, *y, after])


def owners(offsets: Tensor, rows: int) -> Tensor:
    """For each row the number of its expert plus one; 0 and E + 1 are nobody's."""
    return torch.searchsorted(offsets, torch.arange(rows, device=offsets.device, dtype=offsets.dtype), right=True)


def of_experts(tensor: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """tensor [E, N] -> for each row that of its expert [S, N], or zeros."""
    return F.pad(tensor, (0, 0, 1, 1)).index_select(0, owners(offsets, rows))


def by_expert(x: Tensor, offsets: Tensor) -> Tensor:
    """x [S, K] -> the sum of each expert's rows [E, K]."""
    sums = x.new_zeros(len(offsets) + 1, x.shape[1])
    return sums.index_add_(0, owners(offsets, len(x)), x)[1:-1]
