"""Linear products on a CPU by the C library in csrc/, one kernel for each tier of processor.

    y = x W^T + bias,   W read as it lies in the checkpoint (packed, row by row), never expanded in memory

Float activations keep more than the reference: codes are exact, and the scale multiplies in float32 where the
reference rounds W to x's dtype. The int8 path has the same integers as the reference, on every tier and for any number
of threads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...functional.dispatch import Kernel, Problem, register_kernel
from ...functional.linear import reference_linear
from ...functional.several import MOST_WEIGHTS
from . import blocks, library, rows, update  # noqa: F401
from .record import TIERS, TYPES, record_of, refuse_tier


# sums of 65536 products of 8 bits by 8 bits fit 32 bits with room for zero points
MAX_IN_FEATURES = 65536
# vector units step over 32 codes; a group must not end inside a step
GROUP_STEP = 32
# problem -> address of its record and the dtype of scales it was made for
_descriptions: dict[Problem, tuple[int, torch.dtype]] = {}
_kept: list[library.ProblemRecord] = []
# `struct lowbit_weight` of lowbit_cpu.c, for so many weights; seven numbers of 64 bits each
_pack_weights = [struct.Struct(f"{7 * count}q").pack for count in range(MOST_WEIGHTS + 1)]


def refuse(name: str, problem: Problem) -> str | None:
    """Why the tier `name` can't serve a problem, or None."""
    if problem.device != "cpu":
        return f"the tensors are on {problem.device}"
    if problem.dtype not in TYPES:
        return f"no code for {problem.dtype} activations"
    if problem.group_size % GROUP_STEP and problem.group_size < problem.in_features:
        return f"group_size={problem.group_size} is no multiple of {GROUP_STEP}"
    if not 0 < problem.in_features <= MAX_IN_FEATURES:
        return f"in_features={problem.in_features} is outside 1 to {MAX_IN_FEATURES}"
    return refuse_tier(name)


def _describe(problem: Problem, scale_dtype: torch.dtype) -> int:
    """The address of the record that tells C about a problem; made once for each."""
    record = record_of(
        problem.bits, problem.group_size, problem.per_tensor, scale_dtype, problem.dtype, problem.out_features,
        problem.in_features, problem.int8_activations,
    )  # fmt: skip
    if len(_kept) >= 8192:
        # a call that runs now may still read one of the younger records
        _descriptions.clear()
        del _kept[:4096]
    _kept.append(record)
    address = library.address_of(record)
    _descriptions[problem] = address, scale_dtype
    return address


def _linear(
    tier: int,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    problem: Problem,
) -> Tensor:
    address, made_for = _descriptions.get(problem, (0, None))
    if made_for != scale.dtype:
        # scales of a dtype that no checkpoint has: correct before fast
        if scale.dtype != torch.float32 and scale.dtype != torch.bfloat16:
            rows, flat = x.reshape(-1, problem.in_features), weight.view(problem.out_features, -1)
            y = reference_linear(rows, flat, scale, zero_point, bias, problem)
            return y.view(*x.shape[:-1], problem.out_features)
        address = _describe(problem, scale.dtype)
    x, stride = _with_stride(x, problem)
    # named, so that a copy outlives the call
    scale = scale.contiguous()
    zero_point = None if zero_point is None else zero_point.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = x.new_empty((*x.shape[:-1], problem.out_features))
    status = library.load().linear(
        address,
        tier,
        torch.get_num_threads(),
        problem.rows,
        x.data_ptr(),
        stride,
        weight.data_ptr(),
        scale.data_ptr(),
        None if zero_point is None else zero_point.data_ptr(),
        None if bias is None else bias.data_ptr(),
        0 if bias is None else TYPES[bias.dtype],
        y.data_ptr(),
    )
    if status:
        raise MemoryError(f"no memory for the scratch of a product with {problem.rows} rows ({problem}).")
    return y


def _with_stride(x: Tensor, problem: Problem) -> tuple[Tensor, int]:
    """x, a copy where its rows don't lie as C reads them, and the elements from one row to the next."""
    if len(x.shape) != 2:
        return x.contiguous(), problem.in_features
    if x.stride(1) != 1:
        x = x.contiguous()
    return x, x.stride(0)


def _several(
    tier: int,
    x: Tensor,
    weights: Sequence[tuple[Tensor, Tensor, Tensor | None, Tensor | None]],
    problems: tuple[Problem, ...],
) -> list[Tensor] | None:
    problem, scale_dtype = problems[0], weights[0][1].dtype
    address, made_for = _descriptions.get(problem, (0, None))
    if made_for is not scale_dtype:
        if scale_dtype != torch.float32 and scale_dtype != torch.bfloat16:
            return None
        address = _describe(problem, scale_dtype)
    x, stride = _with_stride(x, problem)
    lead, dtype = x.shape[:-1], x.dtype
    # copies, where tensors don't lie as C reads them, must outlive the call
    numbers, results, kept = [], [], []
    for (weight, scale, zero_point, bias), own in zip(weights, problems, strict=True):
        if scale.dtype is not scale_dtype:
            return None
        if not scale.is_contiguous():
            kept.append(scale := scale.contiguous())
        out_features = own.out_features
        y = x.new_empty((*lead, out_features))
        zero_address = bias_address = bias_type = 0
        if zero_point is not None:
            kept.append(zero_point := zero_point.contiguous())
            zero_address = zero_point.data_ptr()
        if bias is not None:
            kept.append(bias := bias.to(dtype).contiguous())
            bias_address, bias_type = bias.data_ptr(), TYPES[dtype]
        numbers += (
            out_features, weight.data_ptr(), scale.data_ptr(), zero_address, bias_address, bias_type, y.data_ptr(),
        )  # fmt: skip
        results.append(y)
    count = len(results)
    status = library.load().linears(
        address, tier, torch.get_num_threads(), problem.rows, x.data_ptr(), stride, count,
        _pack_weights[count](*numbers),
    )  # fmt: skip
    if status:
        raise MemoryError(f"no memory for the scratch of {count} products with {problem.rows} rows ({problem}).")
    return results


def _experts(
    tier: int,
    x: Tensor,
    offsets: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    problem: Problem,
) -> Tensor:
    count, pairs = weight.shape[0], x.shape[0]
    if offsets.shape != (count + 1,):
        raise ValueError(f"Expected {count + 1} offsets for {count} experts. Got {list(offsets.shape)}.")
    if scale.dtype != torch.float32 and scale.dtype != torch.bfloat16:
        # as above: scales of a dtype that no checkpoint has
        scale = scale.to(torch.float32)
    address, made_for = _descriptions.get(problem, (0, None))
    if made_for != scale.dtype:
        address = _describe(problem, scale.dtype)
    # named, so that a copy outlives the call
    offsets = offsets.to(torch.int64).contiguous()
    x, weight, scale = x.contiguous(), weight.contiguous(), scale.contiguous()
    zero_point = None if zero_point is None else zero_point.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = x.new_empty((pairs, problem.out_features))
    status = library.load().experts(
        address,
        tier,
        torch.get_num_threads(),
        count,
        offsets.data_ptr(),
        pairs,
        x.data_ptr(),
        problem.in_features,
        weight.data_ptr(),
        scale.data_ptr(),
        None if zero_point is None else zero_point.data_ptr(),
        None if bias is None else bias.data_ptr(),
        0 if bias is None else TYPES[bias.dtype],
        y.data_ptr(),
    )
    if status == -3:
        raise ValueError(f"`offsets` must ascend within [0, {pairs}]. Got {offsets.tolist()}.")
    if status:
        raise MemoryError(f"no memory for the scratch of {count} experts' products ({problem}).")
    return y


def _kernel(name: str) -> Kernel:
    tier, rank, _ = TIERS[name]
    return Kernel(
        name,
        rank,
        partial(refuse, name),
        partial(_linear, tier),
        takes_batches=True,
        experts=partial(_experts, tier),
        several=partial(_several, tier),
    )


for _name in TIERS:
    register_kernel(_kernel(_name))
