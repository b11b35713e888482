"""A block-sparse layer is a linear layer for every shape of input, whatever its blocks hold."""

import pytest
import torch
from torch import nn

from hf_lowbit.configs.blast import BlockLayout
from hf_lowbit.nn.sparsify import become_masked, clear_module, pack_blocks, restore_dense_blocks, settle_mask


# another order of summation
TOLERANCE = 1e-4
SHAPES = [(64,), (0, 64), (1, 64), (40, 64), (2, 3, 64), (2, 3, 4, 64), (0, 3, 64)]


def layer(balance="row", bits=None, rows=48, columns=64, block=(16, 16), dead_row=False):
    """(block-sparse layer, the dense one that it stands for)."""
    torch.manual_seed(0)
    module = nn.Linear(columns, rows)
    grid = -(-rows // block[0]), -(-columns // block[1])
    live = grid[1] if balance == "row" else grid[0] * grid[1]
    become_masked(module, "linear", BlockLayout((rows, columns), block, "dense", balance, live, bits=bits), 0.5)
    mask = torch.zeros(grid, dtype=torch.bool)
    mask[:, ::2] = True
    if dead_row:
        mask[1] = False
    module.mask = mask
    clear_module(module)
    dense = nn.Linear(columns, rows)
    dense.bias.data.copy_(module.bias.data)
    pack_blocks(module)
    dense.weight.data.copy_(module.dense_weight())
    return module, dense


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("balance", ["row", "none"])
@pytest.mark.parametrize("bits", [None, 8, 4, "ternary"])
def test_shapes(shape, balance, bits):
    module, dense = layer(balance, bits)
    x = torch.randn(shape)
    torch.testing.assert_close(module(x), dense(x), atol=TOLERANCE, rtol=TOLERANCE)
    assert module(x).shape == dense(x).shape


@pytest.mark.parametrize("bits", [None, 4])
def test_input_that_is_not_contiguous_and_edges_that_blocks_reach_over(bits):
    module, dense = layer(bits=bits, rows=50, columns=70, block=(16, 32))
    x = torch.randn(70, 6, 4).permute(2, 1, 0)[:, ::2]
    torch.testing.assert_close(module(x), dense(x), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_dead_block_row_gives_the_bias_alone(bits):
    module, _ = layer("none", bits, dead_row=True)
    y = module(torch.randn(5, 64))
    assert torch.equal(y[:, 16:32], module.bias[16:32].expand(5, 16))


def test_blocks_of_negative_zeros_are_dead():
    module = nn.Linear(64, 32)
    module.weight.data[:16, :16] = -0.0
    module.weight.data[16:, 48:] = 0.0
    become_masked(module, "linear", BlockLayout((32, 64), (16, 16), "dense", "row", 4), 0.25)
    settle_mask(module)
    assert module.mask.tolist() == [[False, True, True, True], [True, True, True, False]]
    clear_module(module)
    assert not torch.signbit(module.weight[:16, :16]).any()


def test_gradients_reach_input_values_and_bias():
    module, dense = layer()
    x, twin = torch.randn(5, 64, requires_grad=True), None
    twin = x.detach().clone().requires_grad_()
    module(x).square().sum().backward()
    dense(twin).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(module.bias.grad, dense.bias.grad, atol=1e-3, rtol=1e-3)
    block = dense.weight.grad[:16, :16]
    torch.testing.assert_close(module.weight.grad[0, 0], block, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("bits", [None, 8])
def test_back_to_a_dense_layer(bits):
    module, dense = layer(bits=bits)
    restore_dense_blocks([module])
    assert type(module) is nn.Linear and torch.equal(module.weight, dense.weight) and module.weight.requires_grad


@pytest.mark.parametrize("bits", [None, 4])
def test_it_compiles_without_a_break(bits):
    module, dense = layer(bits=bits)
    x = torch.randn(3, 64)
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), dense(x), atol=TOLERANCE, rtol=TOLERANCE)
