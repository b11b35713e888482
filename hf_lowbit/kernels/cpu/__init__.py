"""Linear products on a CPU by the C library in csrc/, one kernel for each tier of processor.

    y = x W^T + bias,   W read as it lies in the checkpoint (packed, row by row), never expanded in memory

Float activations keep more than the reference: codes are exact, and the scale multiplies in float32 where the
reference rounds W to x's dtype. The int8 path has the same integers as the reference, on every tier and for any number
of threads.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...functional.dispatch import Kernel, Problem, register_kernel
from ...functional.grid import grid_of
from ...functional.linear import reference_linear
from ...functional.packing import row_bytes
from . import library


# name of a kernel -> its number in C, its rank, the processor features it needs
TIERS = {
    "cpu-amx": (4, 350, library.AMX),
    "cpu-avx512vnni": (3, 300, library.AVX512),
    "cpu-avxvnni": (2, 250, library.AVX2 | library.AVX_VNNI),
    "cpu-avx2": (1, 200, library.AVX2),
    # below the kernels of torch: a processor without a vector tier is better served by them at many rows
    "cpu-portable": (0, 50, 0),
}
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# sums of 65536 products of 8 bits by 8 bits fit 32 bits with room for zero points
MAX_IN_FEATURES = 65536
# vector units step over 32 codes; a group must not end inside a step
GROUP_STEP = 32
# problem -> address of its record and the dtype of scales it was made for
_descriptions: dict[Problem, tuple[int, torch.dtype]] = {}
_kept: list[library.ProblemRecord] = []


def refuse(name: str, problem: Problem) -> str | None:
    """Why the tier `name` can't serve a problem, or None."""
    if problem.device != "cpu":
        return f"the tensors are on {problem.device}"
    if problem.dtype not in _TYPES:
        return f"no code for {problem.dtype} activations"
    if problem.group_size % GROUP_STEP and problem.group_size < problem.in_features:
        return f"group_size={problem.group_size} is no multiple of {GROUP_STEP}"
    if not 0 < problem.in_features <= MAX_IN_FEATURES:
        return f"in_features={problem.in_features} is outside 1 to {MAX_IN_FEATURES}"
    loaded = library.load()
    if loaded.handle is None:
        return loaded.reason
    if loaded.features & TIERS[name][2] != TIERS[name][2]:
        return "the processor lacks the instructions"
    return None


def _describe(problem: Problem, scale_dtype: torch.dtype) -> int:
    """The address of the record that tells C about a problem; made once for each."""
    grid = grid_of(problem.bits)
    grouped = 0 < problem.group_size < problem.in_features
    group = problem.group_size if grouped else problem.in_features
    groups = -(-problem.in_features // group)
    record = library.ProblemRecord(
        field=grid.field_bits,
        offset=-grid.qmin,
        group=group,
        groups=groups,
        scale_stride=0 if problem.per_tensor else groups,
        scale_type=_TYPES[scale_dtype],
        grouped=grouped,
        int8=problem.int8_activations,
        type=_TYPES[problem.dtype],
        rows=problem.out_features,
        columns=problem.in_features,
        row_bytes=row_bytes(problem.in_features, grid),
    )
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
    shape = x.shape
    if len(shape) != 2:
        x = x.contiguous()
        stride = problem.in_features
    else:
        if x.stride(1) != 1:
            x = x.contiguous()
        stride = x.stride(0)
    # named, so that a copy outlives the call
    scale = scale.contiguous()
    zero_point = None if zero_point is None else zero_point.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = x.new_empty((*shape[:-1], problem.out_features))
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
        0 if bias is None else _TYPES[bias.dtype],
        y.data_ptr(),
    )
    if status:
        raise MemoryError(f"no memory for the scratch of a product with {problem.rows} rows ({problem}).")
    return y


def _kernel(name: str) -> Kernel:
    tier, rank, _ = TIERS[name]
    return Kernel(name, rank, partial(refuse, name), partial(_linear, tier), takes_batches=True)


for _name in TIERS:
    register_kernel(_kernel(_name))
