"""Products with live blocks by the C library against the dense product, on every tier this processor has."""

import threading

import pytest
import torch
import torch.nn.functional as F

import hf_lowbit.kernels  # noqa: F401
from hf_lowbit.functional.block_dispatch import BlockProblem, choose_blocks, explain_blocks
from hf_lowbit.functional.block_masks import columns_of, gather
from hf_lowbit.functional.blocks import block_linear
from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.kernels.cpu import library
from hf_lowbit.kernels.cpu.blocks import run
from hf_lowbit.kernels.cpu.record import TIERS, refuse_tier


# plain C is never chosen for blocks, but runs where it is called
TIER_NAMES = [name for name in TIERS if refuse_tier(name) is None]
pytestmark = pytest.mark.skipif(library.load().handle is None, reason=f"no C library: {library.load().reason}")
# float32 sums of about a hundred products of normal numbers; half precisions round the result once
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# (N, K), block: tiles that fill, vectors that end inside a block, sizes no unit divides, edges that blocks reach over
CASES = [((64, 128), (32, 32)), ((96, 200), (16, 64)), ((70, 90), (8, 24)), ((130, 300), (13, 17)),
         ((256, 256), (128, 128)), ((64, 96), (48, 96)), ((5, 3), (1, 1))]  # fmt: skip


def weights(shape, block, balance, dtype, seed=0):
    """A dense weight with dead blocks in float64, and what is stored of it."""
    generator = torch.Generator().manual_seed(seed)
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    scores = torch.rand(grid, generator=generator)
    if balance == "row":
        mask = scores >= scores.topk(max(1, grid[1] // 2), 1).values[:, -1:]
    else:
        mask = scores < 0.4
        mask[0, 0] = True
        mask[-1, 1:] = False
    dense = torch.randn(grid[0] * block[0], shape[1], generator=generator).to(dtype)
    dense *= mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:, : shape[1]]
    columns, pointers = columns_of(mask)
    if balance != "row" and pointers is None:
        columns, pointers = columns.flatten(), torch.arange(grid[0] + 1, dtype=torch.int32) * columns.shape[1]
    return dense.double(), gather(dense, columns, pointers, block).contiguous(), columns, pointers


def product(tier, x, values, columns, pointers):
    height, width = values.shape[-2:]
    count = values.shape[0] if pointers is None else len(pointers) - 1
    problem = BlockProblem(height, width, count, x.shape[1], x.shape[0], x.dtype, "cpu")
    return run(TIERS[tier][0], x, values, columns, pointers, problem)


@pytest.mark.parametrize("tier", TIER_NAMES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("balance", ["row", "none"])
@pytest.mark.parametrize(("shape", "block"), CASES, ids=str)
def test_every_tier_agrees_with_the_dense_product(tier, dtype, balance, shape, block):
    dense, values, columns, pointers = weights(shape, block, balance, dtype)
    for rows in (0, 1, 2, 3, 5, 8, 15, 16, 17, 33, 70):
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
        expected = F.linear(x.double(), dense)
        y = product(tier, x, values, columns, pointers)
        assert y.dtype == dtype and y.shape == expected.shape
        atol = TOLERANCE[dtype] * max(1.0, shape[1] ** 0.5)
        torch.testing.assert_close(y.double(), expected, atol=atol, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("tier", TIER_NAMES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("balance", ["row", "none"])
def test_bits_do_not_depend_on_the_number_of_threads(tier, dtype, balance):
    _, values, columns, pointers = weights((192, 256), (32, 64), balance, dtype)
    threads = torch.get_num_threads()
    try:
        for rows in (1, 7, 64):
            x = torch.randn(rows, 256).to(dtype)
            torch.set_num_threads(1)
            alone = product(tier, x, values, columns, pointers)
            for count in (2, 3, 5):
                torch.set_num_threads(count)
                assert torch.equal(product(tier, x, values, columns, pointers), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("tier", TIER_NAMES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_strides_of_x(tier, dtype):
    dense, values, columns, pointers = weights((64, 128), (32, 32), "row", dtype)
    wide = torch.randn(6, 256).to(dtype)
    for x in (wide[:, :128], wide[:, ::2], wide[:, 64:192], wide[::2, :128], wide[:1, :128].expand(4, -1),
              wide.t()[:128, :6].t()):  # fmt: skip
        y = product(tier, x, values, columns, pointers)
        torch.testing.assert_close(y.double(), F.linear(x.double(), dense), atol=0.1, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("tier", TIER_NAMES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 20])
def test_nan_and_infinity_reach_the_outputs_whose_blocks_see_them(tier, dtype, rows):
    dense, values, columns, pointers = weights((64, 128), (32, 32), "row", dtype)
    for bad in (float("nan"), float("inf")):
        x = torch.randn(rows, 128).to(dtype)
        x[0, 40] = bad
        y = product(tier, x, values, columns, pointers)
        seen = dense[:, 32:64].abs().sum(1) > 0
        assert not y[0, seen].isfinite().any()
        assert y[0, ~seen].isfinite().all() and y[1:].isfinite().all()


def test_a_dead_block_row_gives_positive_zeros():
    _, values, columns, pointers = weights((96, 128), (32, 32), "none", torch.float32)
    pointers = pointers.clone()
    pointers[1:] = pointers[1]
    for tier in TIER_NAMES:
        for rows in (1, 20):
            y = product(tier, -torch.ones(rows, 128), values, columns, pointers)
            assert (y[:, 32:] == 0).all() and not torch.signbit(y[:, 32:]).any()


@pytest.mark.parametrize("balance", ["row", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_through_the_kernel(balance, dtype):
    dense, values, columns, pointers = weights((130, 300), (13, 20), balance, dtype)
    values.requires_grad_()
    x = torch.randn(40, 300).to(dtype).requires_grad_()
    y = block_linear(x, values, columns, None, 300, pointers)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    wide = x.detach().double().requires_grad_(), dense.clone().requires_grad_()
    F.linear(*wide).backward(gradient.double())
    tolerance = TOLERANCE[dtype] * 20
    torch.testing.assert_close(x.grad.double(), wide[0].grad, atol=tolerance, rtol=tolerance)
    wanted = gather(wide[1].grad, columns, pointers, (13, 20))
    torch.testing.assert_close(values.grad.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("balance", ["row", "none"])
@pytest.mark.parametrize(("shape", "block"), [((64, 128), (32, 32)), ((96, 200), (16, 64)), ((144, 96), (48, 48)),
                                              ((64, 90), (16, 16))], ids=str)  # fmt: skip
def test_the_gradient_of_blocks_by_tiles(shape, block, balance):
    if "cpu-amx" not in TIER_NAMES:
        pytest.skip("needs matrix tiles")
    dense, _, columns, pointers = weights(shape, block, balance, torch.bfloat16)
    for rows in (1, 2, 31, 33, 64):
        wide = torch.randn(rows, 2 * shape[1] + dense.shape[0]).bfloat16()
        x, dy = wide[:, : shape[1]], wide[:, shape[1] : shape[1] + dense.shape[0]]
        found = torch.ops.hf_lowbit.block_gradient(dy, x, columns, pointers, *block)
        wanted = gather(dy.double().T @ x.double(), columns, pointers, block)
        torch.testing.assert_close(
            found.double(), wanted, atol=TOLERANCE[torch.bfloat16], rtol=TOLERANCE[torch.bfloat16]
        )
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            assert torch.equal(
                torch.ops.hf_lowbit.block_gradient(dy, x.contiguous(), columns, pointers, *block), found
            )
        finally:
            torch.set_num_threads(threads)


def test_several_threads_of_python_at_once():
    dense, values, columns, pointers = weights((256, 256), (32, 32), "row", torch.bfloat16)
    x = torch.randn(30, 256).bfloat16()
    expected, wrong = block_linear(x, values, columns, None, 256, pointers), []

    def work():
        for _ in range(30):
            if not torch.equal(block_linear(x, values, columns, None, 256, pointers), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_choice_is_explained_and_can_be_forced():
    problem = BlockProblem(32, 32, 2, 128, 4, torch.float32, "cpu")
    best = next((name for name in TIERS if name in TIER_NAMES and name != "cpu-portable"), "torch")
    assert explain_blocks(problem)[-1][0] == best
    with use_kernel("reference"):
        assert choose_blocks(problem) is None
        name, reason = explain_blocks(problem)[-1]
        assert name == "torch" and "forced" in reason
    double = problem._replace(dtype=torch.float64)
    assert choose_blocks(double) is None and "no code for torch.float64" in dict(explain_blocks(double))["cpu-amx"]
    gpu = problem._replace(device="cuda")
    assert "the weight is on cuda" in dict(explain_blocks(gpu))["cpu-amx"]
