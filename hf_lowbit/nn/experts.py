"""Fused experts: modules that hold all experts of a layer in 3-D parameters ([E, N, K], or [E, K, N]).

The model's own forward indexes the parameter by expert (`self.gate_up_proj[e]`). Two ways keep it working:

- modules that follow transformers' experts interface (`has_gate`, `is_transposed`, ... attributes) get a forward of
  ours that multiplies all experts' tokens with their packed weights in one call;
- all other code sees, under the parameter's name, an `ExpertStack` that dequantizes exactly what is indexed or used.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor

from ..functional.experts import experts_linear
from .packed import LowBitModule, dense_rows


# the dtype in which an experts module's own forward reads its stacks; None outside of one
_reading: ContextVar[torch.dtype | None] = ContextVar("hf_lowbit_experts_dtype", default=None)


class ExpertStack:
    """Stands for the dense 3-D parameter: indexing dequantizes the experts asked for, any torch function the whole."""

    def __init__(self, module: LowBitExperts, name: str, dtype: torch.dtype):
        self._module, self._name, self._dtype = module, name, dtype

    def __getitem__(self, index) -> Tensor:
        if isinstance(index, tuple):
            return self.dense()[index]
        module, packed = self._module, self._module.lowbit[self._name]
        scale = module._parameters[f"{self._name}_scale"][index]
        zero_point = module._parameters[f"{self._name}_zero_point"]
        zero_point = None if zero_point is None else zero_point[index]
        dense = dense_rows(packed, module._parameters[self._name][index], scale, zero_point, self._dtype)
        return dense.transpose(-1, -2) if packed.transposed else dense

    def dense(self) -> Tensor:
        """The whole parameter, dense."""
        return self._module.dense_weight(self._name, self._dtype)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._module.lowbit[self._name].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        def densify(value):
            if isinstance(value, ExpertStack):
                return value.dense()
            return type(value)(densify(v) for v in value) if type(value) in (list, tuple) else value

        return func(*densify(args), **{key: densify(value) for key, value in (kwargs or {}).items()})


class RoutedExperts:
    """A forward of ours for modules that follow transformers' experts interface; `_project` says what it multiplies
    with."""

    @property
    def first_projection(self) -> str | None:
        """Name of the stack that reads the tokens; None where the module does not follow the interface."""
        if not (hasattr(self, "has_gate") and hasattr(self, "is_transposed")):
            return None
        return "gate_up_proj" if self.has_gate else "up_proj"

    def _project(self, x: Tensor, name: str, offsets: Tensor) -> Tensor:
        raise NotImplementedError

    def _forward_by_expert(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x [T, K], expert ids and weights [T, k] -> [T, K]; accumulated in float32 (float64 of float64).

        The pairs of token and expert are sorted by expert, so that each expert's rows lie together. An id that is no
        expert's (expert parallelism marks so what other ranks do) adds nothing.
        """
        ids, order = top_k_index.reshape(-1).sort(stable=True)
        token = order // top_k_index.shape[-1]
        offsets = torch.searchsorted(ids, torch.arange(self.num_experts + 1, device=ids.device, dtype=ids.dtype))
        hidden = self._project(x.index_select(0, token), self.first_projection, offsets)
        hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
        hidden = self._project(hidden, "down_proj", offsets)
        if getattr(self, "has_post_expert_norm", False):
            hidden = self.post_expert_norm(hidden)
        wide = torch.promote_types(x.dtype, torch.float32)
        weighted = (hidden * top_k_weights.reshape(-1).index_select(0, order)[:, None]).to(wide)
        return torch.zeros_like(x, dtype=wide).index_add_(0, token, weighted).to(x.dtype)


class LowBitExperts(RoutedExperts, LowBitModule):
    """Mixin put in front of an experts class by `classes.lowbit_class`; its properties hide the packed parameters."""

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        routed = len(args) == 2 and not kwargs
        if routed and self.first_projection in self.lowbit and "down_proj" in self.lowbit:
            return self._forward_by_expert(hidden_states, *args)
        token = _reading.set(hidden_states.dtype)
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            _reading.reset(token)

    def _project(self, x: Tensor, name: str, offsets: Tensor) -> Tensor:
        parameters = self._parameters
        bias = parameters.get(f"{name}_bias") if self.has_bias else None
        return experts_linear(
            x, offsets, parameters[name], parameters[f"{name}_scale"], parameters[f"{name}_zero_point"], bias,
            *self.lowbit[name].product,
        )  # fmt: skip


def stack_property(name: str) -> property:
    """A parameter's name on an experts class: the packed tensor, but an `ExpertStack` for the module's own forward."""

    def read(self):
        dtype = _reading.get()
        if dtype is None or name not in self.__dict__.get("lowbit", {}):
            return self._parameters[name]
        return ExpertStack(self, name, dtype)

    return property(read)
