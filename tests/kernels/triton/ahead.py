"""Compiles kernels ahead of time, for any device and without one, with the constants that `product.py` would launch.

`triton.compile` runs the whole way to machine code (cubin); ptxas and cuobjdump come with triton.
"""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_lowbit.functional.directions import adamw_constants, lion_constants, momentum_constants
from hf_lowbit.functional.grid import grid_of, group_count
from hf_lowbit.functional.noise import key_of
from hf_lowbit.functional.packing import row_bytes
from hf_lowbit.functional.update import Step, Update
from hf_lowbit.kernels.triton.activations import quantize_kernel
from hf_lowbit.kernels.triton.block_launch import constants_of as block_constants_of
from hf_lowbit.kernels.triton.block_launch import gradient_plan, product_plan
from hf_lowbit.kernels.triton.block_tiles import gradient_kernel, product_kernel
from hf_lowbit.kernels.triton.plans import group_of, plan_for
from hf_lowbit.kernels.triton.product import planes_of, tile_constants, word_constants
from hf_lowbit.kernels.triton.splits import sum_kernel
from hf_lowbit.kernels.triton.tiles import tile_kernel
from hf_lowbit.kernels.triton.update import constants_of, width_of
from hf_lowbit.kernels.triton.update_kernel import update_kernel
from hf_lowbit.kernels.triton.words import word_kernel


POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compiled(NamedTuple):
    """Machine code, and the bytes of shared memory that a program takes."""

    ptx: str
    cubin: bytes
    shared: int

    def count(self, instruction: str) -> int:
        """How often an instruction stands in the PTX; a pattern."""
        return len(re.findall(rf"^\s*(?:@%\w+ )?{instruction}", self.ptx, re.MULTILINE))

    def spilled(self, folder: Path) -> int:
        """Bytes of stack and local memory, as the assembler reports them."""
        path = folder / "kernel.cubin"
        path.write_bytes(self.cubin)
        report = subprocess.run([TOOLS / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True)
        found = re.findall(r"(?:STACK|LOCAL):(\d+)", report.stdout + report.stderr)
        assert found, report
        return sum(map(int, found))


def _compile(kernel, types, constants, sizes, capability, **options) -> Compiled:
    """Compile as a launch would: it makes a size of 1 a constant, and notes which sizes 16 divides."""
    specialized = {p.name for p in kernel.params if not p.do_not_specialize}
    constants = constants | {name: 1 for name, size in sizes.items() if size == 1 and name in specialized}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    # memory of torch's allocator begins on such addresses
    pointers = {name for name, kind in types.items() if kind.startswith("*")}
    even = {name for name, size in sizes.items() if size % 16 == 0 and name in specialized} | pointers
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in even}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata.shared)


def compile_product(problem, capability, processors=132, **changes) -> Compiled:
    """The main kernel of a problem, by the plan of the device's table with `changes` of fields of the plan."""
    plan = plan_for(problem, divmod(capability, 10), processors, True)._replace(**changes)
    x = POINTERS[problem.dtype]
    exact = problem.int8_activations and not group_of(problem)
    types = {
        "x": "*i8" if problem.int8_activations else x, "planes": "*i32", "token_scale": "*fp32", "weight": "*i8",
        "scale": "*bf16" if problem.group_size else "*fp32", "zero_point": "*i8", "bias": x,
        "y": x if plan.parts == 1 else "*i32" if exact else "*fp32",
    }  # fmt: skip
    groups = group_count(problem.in_features, group_of(problem) or None)
    sizes = {
        "out_features": problem.out_features, "in_features": problem.in_features, "x_stride": problem.in_features,
        "row_bytes": row_bytes(problem.in_features, grid_of(problem.bits)), "groups": groups,
        "scale_stride": 0 if problem.per_tensor else groups,
    }  # fmt: skip
    if plan.kernel == "words":
        sizes["words"] = -(-problem.in_features // (4 * planes_of(problem)))
        sizes["low_bytes"], sizes["plane_words"] = -(-problem.in_features // 4), 4 * -(-sizes["words"] // 4)
        constants, options = word_constants(problem, plan, True), {}
    else:
        constants, options = tile_constants(problem, plan, True), {"num_stages": plan.stages}
    kernel = word_kernel if plan.kernel == "words" else tile_kernel
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    return _compile(
        kernel, types, constants, sizes, capability, num_warps=plan.warps, enable_fp_fusion=True, **options
    )


def compile_quantize(dtype, capability, width=4096) -> Compiled:
    """The kernel that rounds activations."""
    types = {"x": POINTERS[dtype], "codes": "*i8", "token_scale": "*fp32"}
    sizes = {"in_features": width, "x_stride": width, "plane_size": 16 * -(-width // 16)}
    constants = {"PLANES": 1, "BLOCK": 1024}
    return _compile(quantize_kernel, types, constants, sizes, capability, enable_fp_fusion=False)


def compile_sum(capability, out_features=4096) -> Compiled:
    """The kernel that sums the parts of K."""
    types = {"parts": "*i32", "token_scale": "*fp32", "scale": "*fp32", "bias": "*bf16", "y": "*bf16"}
    constants = {"SPLITS": 4, "HAS_SCALE": True, "INT8": True, "HAS_BIAS": True, "BLOCK": 1024}
    sizes = {"out_features": out_features, "scale_stride": 1}
    return _compile(sum_kernel, types, constants, sizes, capability, enable_fp_fusion=False)


def compile_block_product(problem, capability, weights=1, **changes) -> Compiled:
    """The product with live blocks, `weights` 2: the fused SwiGLU; the plan with `changes`."""
    plan = product_plan(problem, weights)._replace(**changes)
    kind = POINTERS[problem.dtype]
    types = {"x": kind, "values": kind, "second": kind, "columns": "*i32", "pointers": "*i32", "y": kind}
    sizes = {"in_features": problem.in_features, "block_rows": problem.block_rows, "live": 6,
             "x_stride": problem.in_features}  # fmt: skip
    constants = {"HAS_POINTERS": False, "SWIGLU": weights == 2, **block_constants_of(problem, plan)}
    options = {"num_warps": plan.warps, "num_stages": plan.stages, "enable_fp_fusion": True}
    return _compile(product_kernel, types, constants, sizes, capability, **options)


def compile_block_gradient(problem, capability, **changes) -> Compiled:
    """The gradient of live blocks."""
    plan = gradient_plan(problem)._replace(**changes)
    kind = POINTERS[problem.dtype]
    types = {"gradient": kind, "x": kind, "block_rows": "*i32", "columns": "*i32", "out": kind}
    sizes = {"in_features": problem.in_features, "gradient_stride": problem.block_rows * problem.height,
             "x_stride": problem.in_features}  # fmt: skip
    constants = block_constants_of(problem, plan)
    options = {"num_warps": plan.warps, "num_stages": plan.stages, "enable_fp_fusion": True}
    return _compile(gradient_kernel, types, constants, sizes, capability, **options)


CONSTANTS = {
    "adamw": adamw_constants(2, (0.9, 0.999), 1e-8),
    "lion": lion_constants((0.9, 0.99)),
    "sgd": momentum_constants(2, 0.9, False),
}


def compile_update(update: Update, asymmetric: bool, capability: int) -> Compiled:
    """The kernel of direct training's update."""
    step = Step(CONSTANTS[update.rule], key_of(0, 1, "weight"), -1e-3, 0.0)
    constants = constants_of(update, step, asymmetric)
    moment = {32: "*fp32", 16: "*bf16"}.get(update.state_bits, "*u8")
    types = {"stored": "*i8", "scale": POINTERS[update.scale_dtype], "zero_point": "*i8", "m_codes": moment,
             "grad": POINTERS[update.grad_dtype], "m_base": "*i16", "v_codes": moment, "v_base": "*i16",
             "counts": "*i64"}  # fmt: skip
    absent = ([] if asymmetric else ["zero_point"]) + ([] if update.rule == "adamw" else ["v_codes", "v_base"])
    absent += ["m_base", "v_base"] if update.state_bits > 8 else []
    constants |= dict.fromkeys(absent)
    types = {name: kind for name, kind in types.items() if name not in absent}
    floats = ("beta1", "rest1", "beta2", "rest2", "eps", "factor", "rate", "decay")
    types |= dict.fromkeys(floats, "fp32")
    sizes = {"columns": update.columns, "width": width_of(update), "grad_row": update.columns, "grad_column": 1}
    return _compile(update_kernel, types, constants, sizes, capability, num_warps=4, enable_fp_fusion=False)
