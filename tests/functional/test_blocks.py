"""The operator on live blocks against the dense product: values, gradients, shapes, torch's own checks."""

import pytest
import torch
import torch.nn.functional as F

from hf_lowbit.functional.block_masks import columns_of, gather, scatter
from hf_lowbit.functional.blocks import block_linear


# one rounding of bfloat16 for the output, one for each part
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
CASES = {"square": ((64, 96), (16, 16)), "wide": ((48, 64), (8, 32)), "padded": ((50, 70), (16, 32))}


def layer(case, balance, dtype=torch.float32, device="cpu", live=2):
    torch.manual_seed(0)
    (rows, columns), block = CASES[case]
    grid = -(-rows // block[0]), -(-columns // block[1])
    scores = torch.rand(grid)
    mask = scores >= scores.topk(live, 1).values[:, -1:] if balance == "row" else scores < 0.4
    if balance == "none":
        # a dead block row too
        mask[1] = False
        mask[0, 0] = True
    padded = grid[0] * block[0], grid[1] * block[1]
    weight = torch.randn(padded, dtype=torch.float64)
    weight[rows:], weight[:, columns:] = 0, 0
    weight *= mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    cols, pointers = columns_of(mask)
    weight = weight[:, :columns].to(device, dtype)
    moved = cols.to(device), None if pointers is None else pointers.to(device)
    return weight, gather(weight, *moved, block).contiguous(), *moved


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("balance", ["row", "none"])
@pytest.mark.parametrize("lead", [(), (0,), (1,), (3, 5), (2, 3, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_product_and_gradients(case, balance, lead, dtype, device):
    weight, values, columns, pointers = layer(case, balance, dtype, device)
    x = torch.randn(*lead, weight.shape[1], device=device).to(dtype).requires_grad_()
    bias = torch.randn(weight.shape[0], device=device).to(dtype).requires_grad_()
    values.requires_grad_()
    y = block_linear(x, values, columns, bias, weight.shape[1], pointers)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = F.linear(*wide)
    tolerance = TOLERANCE[dtype] * 20
    assert y.dtype == dtype and y.shape == expected.shape
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)
    gradient = torch.randn_like(expected)
    y.backward(gradient.to(dtype))
    expected.backward(gradient.to(dtype).double())
    torch.testing.assert_close(x.grad.double(), wide[0].grad, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(bias.grad.double(), wide[2].grad, atol=tolerance, rtol=tolerance)
    block = values.shape[-2:]
    wanted = gather(wide[1].grad, columns, pointers, tuple(block))
    torch.testing.assert_close(values.grad.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("balance", ["row", "none"])
def test_input_that_is_not_contiguous(balance, device):
    weight, values, columns, pointers = layer("square", balance, device=device)
    x = torch.randn(weight.shape[1], 6, 4, device=device).permute(2, 1, 0)[:, ::2]
    y = block_linear(x, values, columns, None, weight.shape[1], pointers)
    torch.testing.assert_close(y, F.linear(x, weight), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("balance", ["row", "none"])
@pytest.mark.parametrize("case", CASES)
def test_blocks_and_back(case, balance, device):
    weight, values, columns, pointers = layer(case, balance, device=device)
    shape = tuple(weight.shape)
    assert torch.equal(scatter(values, columns, pointers, shape, tuple(values.shape[-2:])), weight)
    assert torch.equal(gather(weight, columns, pointers, tuple(values.shape[-2:])), values)


def test_a_dead_block_row_gives_exact_zeros(device):
    weight, values, columns, pointers = layer("square", "none", device=device)
    y = block_linear(torch.randn(5, weight.shape[1], device=device), values, columns, None, weight.shape[1], pointers)
    assert (y[:, 16:32] == 0).all() and not torch.signbit(y[:, 16:32]).any()


@pytest.mark.parametrize("balance", ["row", "none"])
@pytest.mark.parametrize("rows", [3, 40])
def test_operator_passes_torchs_checks(balance, rows):
    weight, values, columns, pointers = layer("padded", balance)
    x = torch.randn(rows, weight.shape[1], requires_grad=True)
    torch.library.opcheck(torch.ops.hf_lowbit.block_linear, (x, values.requires_grad_(), columns, pointers,
                                                             weight.shape[1]))  # fmt: skip


def test_compiles_without_a_break(device):
    weight, values, columns, pointers = layer("square", "row", device=device)

    def call(x):
        return block_linear(x, values, columns, None, weight.shape[1], pointers).relu()

    x = torch.randn(4, weight.shape[1], device=device)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), call(x))


def test_autocast(device):
    weight, values, columns, pointers = layer("square", "row", device=device)
    x = torch.randn(4, weight.shape[1], device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = block_linear(x, values.requires_grad_(), columns, None, weight.shape[1], pointers)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert values.grad.dtype == torch.float32


def test_wrong_input_is_refused(device):
    weight, values, columns, pointers = layer("square", "row", device=device)
    with pytest.raises(ValueError, match="Expected 96 input features. Got 95"):
        block_linear(torch.zeros(2, 95, device=device), values, columns, None, 96, pointers)
    with pytest.raises(TypeError, match="floating-point"):
        block_linear(torch.zeros(2, 96, dtype=torch.int64, device=device), values, columns, None, 96, pointers)
