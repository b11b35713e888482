"""What GPTQ needs to know of a layer's inputs, gathered by hooks while a model or a block runs.

    H = Xq^T Xq        inputs in the model as it is quantized so far
    C = (X - Xq)^T Xq  how far they are from those in the dense model (error propagation, `propagation.py`)

Layers that read the very same tensor (q, k and v) share one H. Rows of padding are left out. Sums are float32 and grow
with [K, K], never with the number of tokens. With C the sums of every other batch are kept beside the whole: they say
whether a correction holds on tokens that it was not made from (`propagation.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


# columns of H that are computed together
PANEL = 192


@dataclass
class Inputs:
    """Statistics of one shared input: names of the layers that read it, H, C (None without), tokens seen.

    `half_hessian` and `half_drift` are H and C of every other batch; None without C.
    """

    names: list[str]
    hessian: Tensor
    drift: Tensor | None
    tokens: int
    half_hessian: Tensor | None = None
    half_drift: Tensor | None = None


@contextmanager
def watch_inputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """While it is open, the inputs of `modules` are kept: {name: one tensor a call}."""
    seen: dict[str, list[Tensor]] = {name: [] for name in modules}

    def keep(name):
        return lambda module, args, kwargs: seen[name].append(args[0] if args else next(iter(kwargs.values())))

    handles = [m.register_forward_pre_hook(keep(n), with_kwargs=True) for n, m in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class Accumulator:
    """Sums over batches; `add` takes what `watch_inputs` saw in one forward of each stream."""

    def __init__(self):
        self.inputs: dict[str, Inputs] = {}
        self.batches = 0

    def add(self, quantized: dict[str, list[Tensor]], dense: dict[str, list[Tensor]] | None, batch: dict) -> None:
        """Raises ValueError naming the layer when an input holds NaN or infinity."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, tensors in quantized.items():
            if tensors:
                groups.setdefault(tuple(id(t) for t in tensors), []).append(name)
        for names in groups.values():
            xq = torch.cat([_rows(t, batch) for t in quantized[names[0]]])
            entry = self._entry(names, xq, dense is not None)
            entry.tokens += len(xq)
            _add_product(entry.hessian, xq)
            # a sum of squares is NaN or infinite where an input is
            if not bool(torch.isfinite(entry.hessian.diagonal()).all()):
                raise ValueError(
                    f"the inputs of `{names[0]}` hold NaN or infinity on the calibration data: the model is broken "
                    "before this layer, or its dtype is too narrow. Check the checkpoint, or load it in float32."
                )
            if dense is not None:
                difference = torch.cat([_rows(t, batch) for t in dense[names[0]]]).sub_(xq)
                entry.drift.addmm_(difference.t(), xq)
                if self.batches % 2:
                    entry.half_hessian.addmm_(xq.t(), xq)
                    entry.half_drift.addmm_(difference.t(), xq)
        self.batches += 1

    def _entry(self, names: list[str], x: Tensor, drift: bool) -> Inputs:
        found = self.inputs.get(names[0])
        if found is None or any(self.inputs.get(name) is not found for name in names):
            size = x.shape[1]
            sums = [x.new_zeros(size, size) for _ in range(4 if drift else 1)]
            found = Inputs(names, sums[0], sums[1] if drift else None, 0, *sums[2:])
            for name in names:
                self.inputs[name] = found
        return found

    def groups(self) -> list[Inputs]:
        """Each shared input once, in the order of the calls."""
        return list({id(found): found for found in self.inputs.values()}.values())


def _add_product(hessian: Tensor, x: Tensor) -> None:
    """hessian += x^T x. It is symmetric: about half of it is computed, panel by panel, and mirrored."""
    for start in range(0, x.shape[1], PANEL):
        stop = min(start + PANEL, x.shape[1])
        part = x[:, start:stop].t() @ x[:, :stop]
        hessian[start:stop, :stop] += part
        hessian[:start, start:stop] += part[:, :start].t()


def _rows(x: Tensor, batch: dict) -> Tensor:
    """[..., K] -> float32 [tokens, K] without padding."""
    x = x.detach()
    for key in ("attention_mask", "decoder_attention_mask"):
        mask = batch.get(key)
        if isinstance(mask, Tensor) and mask.ndim == 2 and tuple(mask.shape) == tuple(x.shape[:2]) and x.ndim == 3:
            return x[mask.to(x.device).bool()].to(torch.float32)
    return x.reshape(-1, x.shape[-1]).to(torch.float32)
