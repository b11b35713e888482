"""One optimizer step of one weight, a few rows at a time.

For each chunk of rows: moments to float32, direction, moments back, move. Nothing larger than a chunk is float32, so a
weight is never dense in memory; rules that need the whole matrix get the gradient's matrix, one weight at a time. The
result does not depend on the chunks: noise belongs to the element.

Where a fused kernel accepts a low-bit weight it does all of that in one pass, with the same bits
(`functional/update.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..functional.noise import column_words, key_of, more_words, row_words, shifted, words
from ..functional.update import Step, Update, UpdateKernel, Weight, choose_update
from .leaves import CodesLeaf, Leaf, Moved, ScaleLeaf
from .rules import Rule
from .states import States


# torch runs operations of fewer than 2^15 elements on one thread, and they stay in a core's cache; a single thread is
# better off with twice as many, a GPU with all at once
CHUNK = (1 << 15) - 1
LARGE_CHUNK = 1 << 24


def step_leaf(
    leaf: Leaf, grad: Tensor, rule: Rule, states: States, lr: float, decay: float, seed: int, step: int
) -> Moved:
    """Move `leaf` along `grad` [R, K]. `decay` is the rate of decoupled weight decay; `seed` and `step` key the noise.

    Advances `states` by one.
    """
    states.tensors["t"] += 1
    t = states.tensors["t"]
    key = shifted(key_of(seed, step, leaf.name), leaf.own.start)
    kernel = fused(leaf, grad.dtype, rule, states)
    if kernel is not None:
        weight = Weight(leaf.bytes(), *leaf.scales())
        constants = rule.constants(t)
        made = Step(constants, key, -rule.rate(lr, t, leaf.weight_rms, None), lr * decay)
        moved = Moved(*kernel.run(describe(leaf, grad.dtype, rule, states), weight, grad, states.tensors, made))
        # torch saw no write: forms of the weight that evaluation keeps would stay what they were
        torch.autograd.graph.increment_version(weight.stored)
        return moved
    device = grad.device
    per_chunk = leaf.rows if rule.whole else max(1, chunk_size(device) // max(1, leaf.columns))
    noisy = leaf.needs_noise or states.needs_noise
    if noisy:
        columns = column_words(key, leaf.columns, device)
        every_row = row_words(key, 0, leaf.rows, device)
    changed, levels, layerwise = 0, 0.0, getattr(rule, "layerwise", False)
    for start in range(0, leaf.rows, per_chunk):
        rows = slice(start, min(start + per_chunk, leaf.rows))
        if layerwise:
            # decay is within the step; a scale's logarithm has none
            wanted = 0.0 if isinstance(leaf, ScaleLeaf) else decay
            u, moments = rule.step(grad.float(), leaf.layer(), states.read(rows), t, lr, wanted)
        else:
            u, moments = rule.direction(grad[rows].float(), states.read(rows), t)
        word = words(every_row[rows], columns) if noisy else None
        states.write(rows, moments, more_words(word) if states.needs_noise else None)
        rate = 1.0 if layerwise else rule.rate(lr, t, leaf.weight_rms, u)
        moved = leaf.move(rows, u.mul_(-rate), 0.0 if layerwise else lr * decay, word)
        changed, levels = changed + moved.changed, levels + moved.levels
    return Moved(changed, levels)


def describe(leaf: CodesLeaf, grad_dtype: torch.dtype, rule: Rule, states: States) -> Update:
    """What the choice of a kernel depends on."""
    constants, scheme = rule.constants(1), leaf.packed.scheme
    return Update(
        None if constants is None else constants.rule, states.bits, scheme.bits, scheme.block, leaf.rows, leaf.columns,
        grad_dtype, leaf.parameter.scale.dtype, leaf.parameter.device.type,
    )  # fmt: skip


def fused(leaf: Leaf, grad_dtype: torch.dtype, rule: Rule, states: States) -> UpdateKernel | None:
    """The kernel that moves `leaf`, or None for torch."""
    return choose_update(describe(leaf, grad_dtype, rule, states)) if isinstance(leaf, CodesLeaf) else None


def chunk_size(device: torch.device) -> int:
    """Elements that are updated at a time."""
    if device.type != "cpu":
        return LARGE_CHUNK
    return CHUNK if torch.get_num_threads() > 1 else 2 * CHUNK
