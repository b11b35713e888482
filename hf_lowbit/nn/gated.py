"""MLPs whose gate and up projections are block-sparse with one mask: both products and what is between them in one.

    down(silu(gate(x)) * up(x))   =   down(block_swiglu(x))          (functional/block_swiglu.py)

Where a kernel fuses them (Triton's, on CUDA devices), x is read once and the two products stay in registers; they are
not rounded to x's dtype in between, so the last bits differ from those of two products. Everywhere else, and whenever
the layers are not what they were (adapters, hooks, other masks, autocast), the MLP's own forward runs.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

import torch
from torch import Tensor, nn

from ..functional.block_dispatch import choose_blocks
from ..functional.block_swiglu import block_swiglu
from .block_sparse import BlockModule


# forwards, with the name of their argument as X, and what they call gate, up and down
FORMS = {
    "down_proj = self.down_proj(self.act_fn(self.gate_proj(X)) * self.up_proj(X))\nreturn down_proj": (
        "gate_proj", "up_proj", "down_proj"),
    "return self.down_proj(self.act_fn(self.gate_proj(X)) * self.up_proj(X))": ("gate_proj", "up_proj", "down_proj"),
    "return self.w2(F.silu(self.w1(X)) * self.w3(X))": ("w1", "w3", "w2"),
}  # fmt: skip


class GatedBlocks(nn.Module):
    """Mixin put in front of an MLP class by `sparsify.fuse_gated`; `gated` names its gate, up and down projections."""

    gated: tuple[str, str, str]
    _columns: tuple | None = None

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        if args or kwargs or not self.is_fused(x):
            return super().forward(x, *args, **kwargs)
        gate, up, down = (self._modules[name] for name in self.gated)
        layout = gate.layout
        h = block_swiglu(
            x, gate.held(), up.held(), gate.held("_col_indices"), layout.in_features, gate.held("_row_pointers")
        )
        return down(h[..., : layout.out_features])

    def is_fused(self, x: Tensor) -> bool:
        """Whether both products of `x` are one."""
        gate, up = (self._modules[name] for name in self.gated[:2])
        if not (_is_plain(gate) and _is_plain(up) and gate.layout == up.layout):
            return False
        if torch.is_autocast_enabled(x.device.type) or not gate.held().dtype == up.held().dtype == x.dtype:
            return False
        if not x.is_cuda and torch.compiler.is_compiling():
            return False
        kernel = None if x.is_cuda else choose_blocks(gate.problem(x.numel() // max(x.shape[-1], 1), x.dtype))
        return (x.is_cuda or (kernel is not None and kernel.swiglu is not None)) and self._shares(gate, up)

    def _shares(self, gate: BlockModule, up: BlockModule) -> bool:
        """Whether their blocks lie at the same places; compared once, until a tensor of theirs is another."""
        held = [module.held(suffix) for suffix in ("_col_indices", "_row_pointers") for module in (gate, up)]
        versions = [None if t is None else t._version for t in held]
        seen = self._columns
        known = seen is not None and seen[1] == versions and all(a is b for a, b in zip(seen[0], held, strict=True))
        if not known:
            same = [(a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in (held[:2], held[2:])]
            self._columns = held, versions, all(same)
        return self._columns[2]


def _is_plain(module: nn.Module) -> bool:
    """A layer with float blocks, no bias, and nobody who watches its product."""
    if not isinstance(module, BlockModule) or module.layout.bits is not None or module.layout.transposed:
        return False
    watched = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or "forward" in vars(module)
    return module._parameters.get("bias") is None and not watched and not module._backward_pre_hooks


def can_fuse(module: nn.Module) -> tuple[str, str, str] | None:
    """The names of gate, up and down of an MLP that can become a `GatedBlocks`; None for all other modules."""
    names = None if isinstance(module, GatedBlocks) else form_of(type(module))
    if names is None or not all(part in module._modules for part in names):
        return None
    gate, up = (module._modules[name] for name in names[:2])
    activation = module._modules.get("act_fn")
    silu = names[0] == "w1" or type(activation) is nn.SiLU or type(activation).__name__ == "SiLUActivation"
    return names if silu and _is_plain(gate) and _is_plain(up) and torch.equal(gate.mask, up.mask) else None


def form_of(cls: type) -> tuple[str, str, str] | None:
    """Names of the gate, up and down projections of an MLP class whose forward is one of `FORMS`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    arguments = tree.body[0].args.args
    if len(arguments) != 2:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == arguments[1].arg:
            node.id = "X"
    return FORMS.get("\n".join(ast.unparse(step) for step in tree.body[0].body))
