"""Running a model on a batch without leaving traces, and the stacks of blocks in it.

A batch holds keyword arguments of the model's forward. A stack is an `nn.ModuleList` of at least two modules of one
class; lists inside of its members do not count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .report import compute_dtype


Batch = dict[str, Tensor]


def forward(model: nn.Module, batch: Batch, run=None):
    """The model's forward pass of a batch on its device and in its dtype, without a cache. `run` replaces the model's
    call."""
    device, dtype = next(model.parameters()).device, compute_dtype(model)
    arguments = {key: _moved(value, device, dtype) for key, value in batch.items()}
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "use_cache" in parameters or (takes_any and getattr(model.config, "use_cache", None) is not None):
        arguments.setdefault("use_cache", False)
    return (run or model)(**arguments)


def _moved(value, device: torch.device, dtype: torch.dtype):
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def first(output) -> Tensor:
    """The hidden state of what a block returns: itself, or the first of a tuple."""
    return output[0] if isinstance(output, (tuple, list)) else output


def find_stacks(model: nn.Module, holds: Callable[[nn.ModuleList], bool]) -> list[tuple[str, nn.ModuleList]]:
    """Name and list of every outermost stack that `holds` accepts, in the model's order (an encoder before its
    decoder)."""
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2 or len({type(m) for m in module}) > 1:
            continue
        if any(name.startswith(f"{outer}.") for outer, _ in found):
            continue
        if holds(module):
            found.append((name, module))
    return found


@contextmanager
def undisturbed(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards modes, gradients and the generators of random numbers are as before."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    for model in models:
        model.eval()
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def outcome(output) -> tuple[bool, list[Tensor]]:
    """What a model says, and whether it is logits: these, else the last hidden state, else its embeddings (CLIP).

    Raises ValueError naming the output's class where it holds none of them.
    """
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return True, [logits]
    hidden = getattr(output, "last_hidden_state", None)
    if isinstance(hidden, Tensor):
        return False, [hidden]
    items = output.items() if hasattr(output, "items") else ()
    found = [v for k, v in items if k.endswith("embeds") and isinstance(v, Tensor)]
    if not found:
        raise ValueError(f"{type(output).__name__} holds neither logits, nor a last hidden state, nor embeddings.")
    return False, found
