"""Which implementation of an operator runs, and why: the choice as data.

An operator call is described by a `Problem`. Every implementation is a `Kernel` that either takes a problem or gives
the reason why not. `choose` asks them in order of rank and returns the first that takes it, together with the reasons
of those that ranked higher: `report(model)` prints exactly that. A kernel can be forced by the environment variable
HF_LOWBIT_KERNEL or by `with use_kernel(name):`; a forced kernel that can't serve a problem raises, it is never
replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor


ENVIRONMENT_VARIABLE = "HF_LOWBIT_KERNEL"
# what `os.environ` wraps, where it has one: asking that for a key costs a twentieth
_environment, _key_of = os.environ, str
if hasattr(os.environ, "_data") and hasattr(os.environ, "encodekey"):
    _environment, _key_of = os.environ._data, os.environ.encodekey
_key = _key_of(ENVIRONMENT_VARIABLE)
# shapes come and go with the length of the prompt; a bound keeps the table small
MOST_CHOICES = 4096


class Problem(NamedTuple):
    """Everything a kernel may look at to accept or refuse a linear product; hashable.

    `rows` is M, the number of input vectors. `group_size` 0 means no groups: one scale a row, or one in all when
    `per_tensor`.
    """

    bits: str | int
    group_size: int
    per_tensor: bool
    asymmetric: bool
    int8_activations: bool
    out_features: int
    in_features: int
    rows: int
    dtype: torch.dtype
    device: str


class Kernel(NamedTuple):
    """One implementation. `refuse(problem)` returns None to accept or a sentence that says why not.

    `run(x, weight, scale, zero_point, bias, problem)` gets x [M, K] (any strides), weight int8 [N, R] contiguous,
    scale and zero_point [N, G], [N, 1] or [1, 1], bias [N] in x's dtype or None, and returns [M, N] in x's dtype.
    `remark(problem)` may add to the reason what a user should know, such as memory that speed costs. A kernel that
    `takes_stored` weights gets them as they are stored, [N, R] or [1, N, R]; one that `takes_batches` also gets x as
    it is, [..., K], and returns [..., N]: a view costs as much as the choice. `experts(x, offsets, weight, scale,
    zero_point, bias, problem)` does the products of many experts at once, see experts.py; weight is int8 [E, N, R].
    `several(x, weights, problems)` does those of several weights with one x as it is, see several.py; biases may have
    any dtype.
    `device`: the one type of device it is for, if any: elsewhere its refusal goes without saying.
    """

    name: str
    rank: int
    refuse: Callable[[Problem], str | None]
    run: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Problem], Tensor]
    remark: Callable[[Problem], str | None] = lambda problem: None
    takes_stored: bool = False
    takes_batches: bool = False
    experts: Callable[..., Tensor] | None = None
    several: Callable[..., list[Tensor] | None] | None = None
    device: str | None = None


class Choice(NamedTuple):
    """The kernel that runs and a sentence with the reasons."""

    kernel: Kernel
    reason: str


_kernels: list[Kernel] = []
_forced: ContextVar[str | None] = ContextVar("hf_lowbit_forced_kernel", default=None)
# the key is a problem, or what `choose_for` was given, and the forced kernel
_choices: dict[tuple, Any] = {}


def register_kernel(kernel: Kernel) -> None:
    """Add an implementation, or replace the one of the same name."""
    _kernels[:] = sorted([k for k in _kernels if k.name != kernel.name] + [kernel], key=lambda k: -k.rank)
    _choices.clear()


def kernel_names() -> list[str]:
    """Names of the registered kernels, the preferred first."""
    return [kernel.name for kernel in _kernels]


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Force one kernel inside the block. Unknown names raise ValueError at once."""
    _check(name)
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def choose(problem: Problem) -> Choice:
    """The kernel for a problem. Raises ValueError when a forced kernel does not exist or can't serve it."""
    forced = forced_kernel()
    key = (problem, forced)
    choice = _choices.get(key)
    if choice is None:
        if len(_choices) > MOST_CHOICES:
            _choices.clear()
        choice = _choices[key] = _choose(problem, forced)
    return choice


def chosen(call: tuple) -> tuple[Kernel, Problem] | None:
    """What `remember` noted for `call` under the kernel that is forced now, or None.

    Building and hashing a `Problem` costs as much as a small product; `call` is a cheaper key that determines it.
    """
    return _choices.get((call, forced_kernel()))


def remember(call: tuple, kernel: Kernel, problem: Problem) -> None:
    """Note the kernel that `choose` gave for a problem, for `chosen(call)`."""
    if len(_choices) > MOST_CHOICES:
        _choices.clear()
    _choices[call, forced_kernel()] = kernel, problem


def forced_kernel() -> str | None:
    """The name that `use_kernel` or the environment variable gives, unchecked, or None."""
    return _forced.get() or (os.environ.get(ENVIRONMENT_VARIABLE) if _key in _environment else None) or None


def _choose(problem: Problem, forced: str | None) -> Choice:
    if forced is not None:
        kernel = next(k for k in _kernels if k.name == _check(forced))
        refusal = kernel.refuse(problem)
        if refusal is not None:
            raise ValueError(
                f"kernel {forced!r} was forced but can't run {problem}: {refusal}. Remove {ENVIRONMENT_VARIABLE} or "
                "the `use_kernel` block to let the library choose."
            )
        return _choice(kernel, problem, ["forced"])
    reasons = []
    for kernel in _kernels:
        refusal = kernel.refuse(problem)
        if refusal is None:
            return _choice(kernel, problem, reasons or ["preferred"])
        if kernel.device in (None, problem.device):
            reasons.append(f"not {kernel.name}: {refusal}")
    raise RuntimeError(f"no kernel takes {problem}: {'; '.join(reasons)}")


def _choice(kernel: Kernel, problem: Problem, reasons: list[str]) -> Choice:
    remark = kernel.remark(problem)
    return Choice(kernel, "; ".join(reasons if remark is None else [*reasons, remark]))


def _check(name: str) -> str:
    if name not in kernel_names():
        raise ValueError(f"`{name}` is no registered kernel; use one of {kernel_names()}.")
    return name
