"""From a call of the operator to launches: activations quantized, the product, and the sum over the parts of K.

Nothing here waits for the device or reads from it, and all memory comes from torch's allocator, so that a call can be
captured in a CUDA graph. Kernels are compiled at their first launch: a graph needs one call before its capture.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch
import triton
from torch import Tensor

from ...functional.dispatch import Problem
from ...functional.grid import grid_of
from ...functional.packing import row_bytes
from .activations import quantize_kernel
from .plans import Plan, group_of, plan_for
from .splits import sum_kernel
from .tiles import tile_kernel
from .words import word_kernel


# Triton reads the variable at import, as we do here; its interpreter runs kernels on the CPU, for tests
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
# rows of quantized activations begin on addresses that wide loads can take
ROW_ALIGNMENT = 16
SUM_BLOCK = 1024


def product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    problem: Problem,
    plan: Plan | None = None,
) -> Tensor:
    """y [M, N] in x's dtype: arguments as `Kernel.run` gets them, by `plan` or the one of the device's table."""
    # the interpreter rounds to bfloat16 by cutting, and cannot multiply it: it gives float32
    upcast = INTERPRETED and x.dtype == torch.bfloat16
    y = torch.empty(problem.rows, problem.out_features, dtype=torch.float32 if upcast else x.dtype, device=x.device)
    if not y.numel():
        return y.to(x.dtype)
    aligned = weight.data_ptr() % 4 == 0
    plan = plan or plan_for(problem, *_device(x.device), aligned)
    scale = scale.contiguous()
    zero_point = None if zero_point is None else zero_point.contiguous()
    bias = None if bias is None else bias.contiguous()
    token_scale = None
    if problem.int8_activations:
        x, token_scale = quantize(x, planes_of(problem) if plan.kernel == "words" else 1)
    elif x.stride(1) != 1:
        x = x.contiguous()
    # a launch wants a pointer where a kernel reads none
    pointers = [scale if t is None else t for t in (token_scale, zero_point, bias)]
    partial = plan.parts > 1
    exact = problem.int8_activations and not group_of(problem)
    target = y
    if partial:
        sums = torch.int32 if exact else torch.float32
        target = torch.empty(plan.parts, problem.rows, problem.out_features, dtype=sums, device=y.device)
    if plan.kernel == "words":
        constants = word_constants(problem, plan, bias is not None)
        _launch_words(x, weight, scale, *pointers, target, problem, plan, constants)
    else:
        constants = tile_constants(problem, plan, bias is not None, aligned, upcast)
        _launch_tiles(x, weight, scale, *pointers, target, problem, plan, constants)
    if partial:
        sum_kernel[(triton.cdiv(y.numel(), SUM_BLOCK),)](
            target, pointers[0], scale, pointers[2], y, problem.rows, problem.out_features, _scale_stride(scale),
            SPLITS=plan.parts, HAS_SCALE=not group_of(problem), INT8=problem.int8_activations,
            HAS_BIAS=bias is not None, BLOCK=SUM_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    return y.to(problem.dtype)


def planes_of(problem: Problem) -> int:
    """Fields a byte of the packed weight holds; of 3 bits, a byte of its first plane."""
    return 4 if problem.bits == 3 else 8 // grid_of(problem.bits).field_bits


def quantize(x: Tensor, planes: int) -> tuple[Tensor, Tensor]:
    """Codes int8 [M, planes, size] of the rows of x, and their t float32 [M]; size is a multiple of ROW_ALIGNMENT."""
    rows, width = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    size = triton.cdiv(triton.cdiv(width, planes), ROW_ALIGNMENT) * ROW_ALIGNMENT
    codes = torch.empty(rows, planes, size, dtype=torch.int8, device=x.device)
    token_scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(4096, triton.next_power_of_2(size * planes))
    # a fused multiplication and addition would round once where the reference rounds twice
    quantize_kernel[(rows,)](
        x, codes, token_scale, width, x.stride(0), size, PLANES=planes, BLOCK=block,
        num_warps=8 if block > 1024 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, token_scale


def tile_constants(problem: Problem, plan: Plan, has_bias: bool, aligned: bool = True, upcast: bool = False) -> dict:
    """What `tile_kernel` is compiled for; `aligned`: the weight begins on an even address."""
    field_bits = grid_of(problem.bits).field_bits
    return {
        "FIELD": field_bits, "OFFSET": offset_of(problem), "GROUP": group_of(problem), "HAS_ZERO": problem.asymmetric,
        "HAS_BIAS": has_bias, "INT8": problem.int8_activations, "SCALE_FIRST": plan.scale_first,
        "SCALE_AHEAD": plan.scale_ahead,
        "PARTIAL": plan.parts > 1, "PRECISION": "tf32x3" if problem.dtype == torch.float32 else "ieee",
        "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k,
        "EVEN_K": problem.in_features % plan.block_k == 0, "UPCAST": upcast and not problem.int8_activations,
        "EMULATED": INTERPRETED,
        "ALIGNED": aligned and row_bytes(problem.in_features, grid_of(problem.bits)) % 2 == 0,
    }  # fmt: skip


def word_constants(problem: Problem, plan: Plan, has_bias: bool) -> dict:
    """What `word_kernel` is compiled for."""
    return {
        "FIELD": grid_of(problem.bits).field_bits, "OFFSET": offset_of(problem), "GROUP": group_of(problem),
        "HAS_ZERO": problem.asymmetric, "HAS_BIAS": has_bias, "PARTIAL": plan.parts > 1, "BLOCK_N": plan.block_n,
        "BLOCK_W": plan.block_k, "STAGES": plan.stages, "EMULATED": INTERPRETED,
    }  # fmt: skip


def _launch_tiles(x, weight, scale, token_scale, zero_point, bias, y, problem, plan, constants):
    tiles = triton.cdiv(problem.rows, plan.block_m) * triton.cdiv(problem.out_features, plan.block_n)
    # one row has no distance to the next: torch may give any number
    stride = x.stride(0) if problem.rows > 1 or problem.int8_activations else problem.in_features
    tile_kernel[(tiles, plan.parts)](
        x, token_scale, weight, scale, zero_point, bias, y,
        problem.rows, problem.out_features, problem.in_features, stride, weight.shape[1], _scale_stride(scale),
        plan.part_steps, **constants, num_warps=plan.warps, num_stages=plan.stages, enable_fp_fusion=True,
    )  # fmt: skip


def _launch_words(x, weight, scale, token_scale, zero_point, bias, y, problem, plan, constants):
    words = triton.cdiv(problem.in_features, 4 * planes_of(problem))
    word_kernel[(triton.cdiv(problem.out_features, plan.block_n), plan.parts)](
        x.view(torch.int32), token_scale, weight, scale, zero_point, bias, y,
        problem.out_features, words, weight.shape[1], triton.cdiv(problem.in_features, 4), x.shape[2] // 4,
        scale.shape[1], _scale_stride(scale), plan.part_steps, **constants, num_warps=plan.warps,
        enable_fp_fusion=True,
    )  # fmt: skip


def _scale_stride(scale: Tensor) -> int:
    """Scales from one row of weights to the next; 0 where one serves all."""
    return 0 if scale.numel() == 1 else scale.shape[1]


def offset_of(problem: Problem) -> int:
    """What a stored field is above its code; 8 bits are stored as they are."""
    return 0 if problem.bits == 8 else -grid_of(problem.bits).qmin


@lru_cache
def _device(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors; for the interpreter, those of a small device."""
    if device.type == "cpu":
        return (9, 0), 8
    return torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count
