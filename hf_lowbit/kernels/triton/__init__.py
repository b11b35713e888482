"""Linear products on CUDA devices, written in Triton.

    y = x W^T + bias,   W read as it lies in the checkpoint (packed, row by row), unpacked in registers

This file only registers the kernel: triton is imported, and a kernel compiled, by the first product on a device. Which
of the kernels runs, and in what shapes, is data: `plans.py` reads it from tables/.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache

import torch
from torch import Tensor

from ...functional.dispatch import Kernel, Problem, register_kernel


NAME = "triton"
# bfloat16 on tensor cores and asynchronous copies begin here
LEAST_CAPABILITY = (8, 0)
# the oldest that compiles what is written here; torch 2.8 brings it
LEAST_TRITON = (3, 4)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# a step of a tile is at least so long, and lies in one group
GROUP_STEP = 32
# 127 * 255 * 65536 fits int32
MAX_IN_FEATURES_INT8 = 65536


def refuse(problem: Problem) -> str | None:
    """None, or why no Triton kernel can serve a problem."""
    if problem.device != "cuda":
        return f"the tensors are on {problem.device}"
    return refuse_problem(problem) or refuse_machine()


def refuse_problem(problem: Problem) -> str | None:
    """None, or what of the problem itself no kernel can do, whatever the device."""
    if problem.dtype not in DTYPES:
        return f"no code for {problem.dtype} activations"
    if problem.group_size % GROUP_STEP and problem.group_size < problem.in_features:
        return f"group_size={problem.group_size} is no multiple of {GROUP_STEP}"
    if problem.in_features < 1:
        return "in_features=0: there is nothing to multiply"
    if problem.int8_activations and problem.in_features > MAX_IN_FEATURES_INT8:
        return f"sums of {problem.in_features} int8 products can overflow; it takes up to {MAX_IN_FEATURES_INT8}"
    return None


def refuse_devices(
    triton_version: str | None, hip: str | None, devices: list[tuple[str, tuple[int, int]]]
) -> str | None:
    """None, or what a machine lacks: a version of triton (None: not there), a CUDA torch, devices of the needed
    compute capability, given as (name, capability).

    All devices must do: the choice of a kernel does not know the number of one.
    """
    if hip is not None:
        return "this torch is built for ROCm, for which the kernels are not tested"
    for name, capability in devices:
        if capability < LEAST_CAPABILITY:
            return f"{name} has compute capability {_dotted(capability)}, the kernels need {_dotted(LEAST_CAPABILITY)}"
    if triton_version is None:
        return "triton is not installed; it comes with `pip install hf_lowbit[gpu]`"
    if tuple(int(part) for part in triton_version.split(".")[:2]) < LEAST_TRITON:
        return f"triton {triton_version} is installed, the kernels need {_dotted(LEAST_TRITON)}"
    return None


@cache
def refuse_machine() -> str | None:
    """`refuse_devices` of this machine."""
    version = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None
    count = torch.cuda.device_count()
    devices = [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count)]
    return refuse_devices(version, torch.version.hip, devices)


def remark(problem: Problem) -> str:
    """How a problem runs on the first device, for the report."""
    from .plans import plan_for

    return str(plan_for(problem, torch.cuda.get_device_capability(), _processors(0), aligned=True))


def run(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, problem: Problem
) -> Tensor:
    """y [M, N] in x's dtype, as `Kernel.run` asks."""
    from .product import product

    if x.device.index == torch.cuda.current_device():
        return product(x, weight, scale, zero_point, bias, problem)
    # a launch goes to the current device, which need not be that of the tensors when a model lies on several
    with torch.cuda.device(x.device):
        return product(x, weight, scale, zero_point, bias, problem)


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


@cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


register_kernel(Kernel(NAME, 400, refuse, run, remark=remark, device="cuda"))
