"""The block-sparse Triton kernels in Triton's interpreter, against the definition.

bfloat16 runs in float32 there (UPCAST), see test_interpreted_linear.py.
"""

import pytest
import torch
import torch.nn.functional as F

from hf_lowbit.functional.block_dispatch import BlockProblem
from hf_lowbit.functional.block_masks import gather
from hf_lowbit.functional.blocks import block_linear, problem_of, transpose_blocks
from tests.kernels.test_cpu_blocks import TOLERANCE, weights
from tests.kernels.triton.conditions import need_interpreter


need_interpreter()

from hf_lowbit.kernels.triton import block_launch  # noqa: E402


# (N, K), block: whole tiles, several parts of a block, sizes no tile divides, edges that blocks reach over
CASES = [((64, 128), (32, 32)), ((128, 128), (64, 64)), ((96, 96), (48, 96)), ((70, 90), (8, 24)),
         ((26, 60), (13, 17)), ((128, 128), (128, 128))]  # fmt: skip
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
balances = pytest.mark.parametrize("balance", ["row", "none"])


def close(y, expected, dtype):
    assert y.dtype == dtype and y.shape == expected.shape
    size = TOLERANCE[dtype] * 12
    torch.testing.assert_close(y.double(), expected, atol=size, rtol=TOLERANCE[dtype])


@dtypes
@balances
@pytest.mark.parametrize(("shape", "block"), CASES, ids=str)
def test_products(shape, block, balance, dtype):
    dense, values, columns, pointers = weights(shape, block, balance, dtype)
    for rows in (0, 1, 17):
        x = torch.randn(rows, shape[1]).to(dtype)
        y = block_launch.product(x, values, columns, pointers, problem_of(x, values, pointers))
        close(y, F.linear(x.double(), dense), dtype)


@dtypes
@balances
@pytest.mark.parametrize(("shape", "block"), CASES[:4], ids=str)
def test_a_fused_swiglu_reads_x_once_for_both_weights(shape, block, balance, dtype):
    gate, values, columns, pointers = weights(shape, block, balance, dtype)
    # halves of the first weight: blocks at the same places
    up, other = gate * 0.5, values * 0.5
    x = torch.randn(5, shape[1]).to(dtype)
    y = block_launch.product(x, values, columns, pointers, problem_of(x, values, pointers), other)
    g = F.linear(x.double(), gate)
    close(y, g * torch.sigmoid(g) * F.linear(x.double(), up), dtype)


@dtypes
@balances
@pytest.mark.parametrize(("shape", "block"), CASES, ids=str)
def test_gradients(shape, block, balance, dtype):
    dense, values, columns, pointers = weights(shape, block, balance, dtype)
    x, dy = torch.randn(35, shape[1]).to(dtype), torch.randn(35, dense.shape[0]).to(dtype)
    problem = problem_of(x, values, pointers)
    found = block_launch.gradient(dy, x, columns, pointers, problem)
    wanted = gather(dy.double().T @ x.double(), columns, pointers, block)
    close(found, wanted, dtype)
    moved, across, ends = transpose_blocks(values, columns, pointers, -(-shape[1] // block[1]))
    transposed = problem_of(dy, moved, ends)
    close(block_launch.product(dy, moved, across, ends, transposed)[:, : shape[1]], dy.double() @ dense, dtype)


def test_strides_and_dead_rows():
    dense, values, columns, pointers = weights((64, 128), (32, 32), "none", torch.float32)
    pointers = pointers.clone()
    pointers[1:] = pointers[1]
    wide = torch.randn(40, 256)
    for x in (wide[:3, :128], wide[:3, ::2], wide[:1, :128].expand(4, -1), wide.t()[:128, :6].t()):
        y = block_launch.product(x, values, columns, pointers, problem_of(x, values, pointers))
        torch.testing.assert_close(y[:, :32], block_linear(x, values, columns, None, 128, pointers)[:, :32])
        assert not y[:, 32:].any() and not torch.signbit(y[:, 32:]).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block", [8, 32, 64, 96, 128])
def test_tiles_fit_every_device(block, dtype):
    for rows in (1, 16, 65, 4096):
        problem = BlockProblem(block, block, 64, 8192, rows, dtype, "cuda")
        for plan in (block_launch.product_plan(problem), block_launch.product_plan(problem, 2)):
            weights_of_tile = plan.block_n * plan.block_k * dtype.itemsize
            assert plan.stages * (weights_of_tile + plan.block_m * plan.block_k * dtype.itemsize) <= 96 * 1024
            assert min(plan[:3]) >= 16
        plan = block_launch.gradient_plan(problem)
        step = plan.block_m * (plan.block_n + plan.block_k)
        assert plan.stages * step * dtype.itemsize <= 96 * 1024
