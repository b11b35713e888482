"""When the Triton kernels are chosen, and the sentences with which they refuse. None of this needs triton or a GPU."""

import os
import subprocess
import sys

import pytest
import torch

from hf_lowbit.functional import block_dispatch
from hf_lowbit.functional.block_dispatch import BlockProblem, explain_blocks
from hf_lowbit.functional.dispatch import ENVIRONMENT_VARIABLE, Problem, choose, kernel_names, use_kernel
from hf_lowbit.functional.linear import linear
from hf_lowbit.kernels import triton
from hf_lowbit.kernels.triton import blocks, refuse_devices, refuse_problem
from tests.kernels.weights import make_weight


PROBLEM = Problem(4, 128, False, False, False, 4096, 4096, 1, torch.bfloat16, "cuda")
H200, T4 = ("H200", (9, 0)), ("T4", (7, 5))


def test_it_comes_first():
    assert kernel_names()[0] == triton.NAME


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": torch.float64}, "no code for torch.float64 activations"),
        ({"group_size": 48}, "group_size=48 is no multiple of 32"),
        ({"in_features": 0}, "in_features=0"),
        ({"in_features": 65537, "int8_activations": True}, "65537 int8 products can overflow"),
    ],
    ids=["float64", "odd-group", "nothing", "long-rows"],
)
def test_refuses_problems(changes, sentence):
    assert sentence in refuse_problem(PROBLEM._replace(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"rows": 0}, {"rows": 1 << 20}, {"dtype": torch.float16}, {"dtype": torch.float32}, {"bits": "ternary"},
        {"group_size": 0, "per_tensor": True}, {"group_size": 32}, {"group_size": 8192}, {"group_size": 5000},
        {"in_features": 1}, {"in_features": 65537}, {"in_features": 65536, "int8_activations": True},
    ],
    ids=str,
)  # fmt: skip
def test_takes_problems(changes):
    assert refuse_problem(PROBLEM._replace(**changes)) is None


@pytest.mark.parametrize(
    ("machine", "sentence"),
    [
        ((None, None, [H200]), "triton is not installed; it comes with `pip install hf_lowbit[gpu]`"),
        (("3.2.0", None, [H200]), "triton 3.2.0 is installed, the kernels need 3.4"),
        (("3.9.0", "6.4", [("MI300X", (9, 4))]), "ROCm"),
        (("3.9.0", None, [T4]), "T4 has compute capability 7.5, the kernels need 8.0"),
        (("3.9.0", None, [H200, T4]), "T4"),
        (("3.9.0", None, [H200]), None),
        (("3.10.0+git1234", None, [("A100", (8, 0))]), None),
    ],
    ids=["no-triton", "old-triton", "rocm", "old-device", "one-old-device", "h200", "nightly"],
)
def test_refuses_machines(machine, sentence):
    refusal = refuse_devices(*machine)
    assert refusal is None if sentence is None else sentence in refusal


def test_a_cpu_does_not_read_about_it(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert triton.refuse(PROBLEM._replace(device="cpu")) == "the tensors are on cpu"
    assert triton.NAME not in choose(PROBLEM._replace(device="cpu")).reason


def test_forced_on_a_cpu_it_says_why_not():
    weight = make_weight(4, 32, False, 8, 64)
    with pytest.raises(ValueError, match="'triton' was forced but can't run .*: the tensors are on cpu"):
        with torch.no_grad(), use_kernel(triton.NAME):
            linear(torch.randn(1, 64), *weight, None, 4, 64, 32)


def test_a_refused_problem_on_a_gpu_says_why():
    choice = choose(PROBLEM._replace(group_size=48))
    assert choice.kernel.name != triton.NAME and "not triton: group_size=48 is no multiple of 32" in choice.reason


def test_live_blocks_on_a_gpu():
    asked = BlockProblem(64, 64, 32, 2048, 16, torch.bfloat16, "cuda")
    assert "the weight is on cpu" in blocks.refuse(asked._replace(device="cpu"))
    assert "no code for 4-bit live blocks" in blocks.refuse(asked._replace(bits=4))
    assert "no code for torch.float64" in blocks.refuse(asked._replace(dtype=torch.float64))
    kernel = next(kernel for kernel in block_dispatch._kernels if kernel.name == triton.NAME)
    assert kernel.gradient is blocks.gradient and kernel.swiglu is blocks.swiglu
    # where triton or a device is missing, torch multiplies, and says so
    name, why = explain_blocks(asked)[-1]
    assert name in ("torch", triton.NAME) and (name == triton.NAME or "operation by operation" in why)


def test_registering_imports_no_triton():
    program = "import sys, hf_lowbit.kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env={**os.environ}).returncode == 0
