"""Products of experts with live blocks: masked dense matrices one by one are the truth, for outputs and gradients."""

import pytest
import torch
import torch.nn.functional as F

from hf_lowbit.functional.block_codes import dequantize_blocks, quantize_blocks
from hf_lowbit.functional.block_experts import block_code_experts, block_experts
from hf_lowbit.functional.block_masks import best_blocks, columns_of, gather, scatter
from hf_lowbit.nn.sparse_experts import by_expert, dense_experts, of_experts


# sums of at most 48 products of numbers near 1
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.15}
# experts 1 and 3 have no row; the first two rows and the last one are nobody's
OFFSETS = torch.tensor([2, 7, 7, 10, 10])
ROWS = 11
CASES = {"whole": ((4, 32, 48), (8, 16)), "edges": ((4, 20, 30), (8, 16)), "one-row": ((4, 8, 16), (8, 8))}


def stack(case, balance, dtype=torch.float64):
    """A masked stack [E, N, K], its live blocks, where they lie, and x."""
    shape, block = CASES[case]
    generator = torch.Generator().manual_seed(0)
    grid = -(-shape[1] // block[0]), -(-shape[2] // block[1])
    count = 1 if balance == "row" else max(1, grid[0] * grid[1] // 2)
    scores = torch.rand(shape[0], *grid, generator=generator)
    mask = best_blocks(scores, count, balance)
    if balance == "ragged":
        # experts with other numbers of blocks, and one without any
        mask[0], mask[2, 0] = False, True
    columns, pointers = columns_of(mask)
    dense = torch.randn(shape, generator=generator, dtype=dtype)
    dense = scatter(gather(dense, columns, pointers, block), columns, pointers, shape, block)
    x = torch.randn(ROWS, shape[2], generator=generator, dtype=dtype)
    return dense, gather(dense, columns, pointers, block), columns, pointers, x


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("balance", ["row", "none", "ragged"])
@pytest.mark.parametrize("case", CASES)
def test_products_and_gradients(case, balance, dtype):
    dense, values, columns, pointers, x = stack(case, balance, dtype)
    assert (pointers is None) == (values.ndim == 5)
    wide, own = [x.clone().requires_grad_(), dense.clone().requires_grad_()], [x.requires_grad_(),
                                                                               values.requires_grad_()]  # fmt: skip
    expected = dense_experts(wide[0], OFFSETS, wide[1])
    y = block_experts(own[0], OFFSETS, own[1], columns, pointers, dense.shape[2])
    assert y.dtype == dtype and y.shape[1] % CASES[case][1][0] == 0
    y = y[:, : dense.shape[1]]
    near = {"atol": CLOSE[dtype], "rtol": CLOSE[dtype]}
    torch.testing.assert_close(y, expected, **near)
    assert (y[:2] == 0).all() and (y[10:] == 0).all()
    gradient = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    y.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(own[0].grad, wide[0].grad, **near)
    wanted = gather(wide[1].grad, columns, pointers, CASES[case][1])
    torch.testing.assert_close(own[1].grad, wanted, **near)
    if pointers is None:
        assert (own[1].grad[[1, 3]] == 0).all()


def test_each_expert_is_its_linear_layer():
    dense, *_, x = stack("whole", "none")
    y = dense_experts(x, OFFSETS, dense)
    for expert, (begin, end) in enumerate(zip(OFFSETS, OFFSETS[1:], strict=False)):
        assert torch.equal(y[begin:end], F.linear(x[begin:end], dense[expert]))
    sums, bias = by_expert(x, OFFSETS), of_experts(torch.arange(1.0, 5)[:, None], OFFSETS, ROWS)
    assert torch.equal(sums[1], torch.zeros_like(sums[1])) and torch.allclose(sums[2], x[7:10].sum(0))
    assert bias.flatten().tolist() == [0, 0, 1, 1, 1, 1, 1, 3, 3, 3, 0]


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("bits", [8, 4, "ternary"])
@pytest.mark.parametrize("balance", ["row", "none"])
def test_codes(balance, bits, int8):
    dense, values, columns, pointers, x = stack("edges", balance, torch.float32)
    stored, scale = quantize_blocks(values, bits)
    x.requires_grad_()
    arguments = columns, pointers, dense.shape[2], bits, 16, int8
    y = block_code_experts(x, OFFSETS, stored, scale, *arguments)[:, : dense.shape[1]]
    rounded = scatter(dequantize_blocks(stored, scale, bits, 16), columns, pointers, tuple(dense.shape), (8, 16))
    wide = x.detach().clone().requires_grad_()
    expected = dense_experts(wide, OFFSETS, rounded)
    # activations of 8 bits differ from the float ones by up to 1/254 of the largest
    torch.testing.assert_close(y, expected, atol=0.3 if int8 else 1e-4, rtol=0.0)
    y.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, wide.grad, atol=1e-4, rtol=1e-4)


def test_no_rows_at_all():
    _, values, columns, pointers, x = stack("whole", "row")
    y = block_experts(x[:0], torch.zeros(5, dtype=torch.int64), values, columns, pointers, 48)
    assert y.shape == (0, 32)


def test_wrong_inputs():
    _, values, columns, pointers, x = stack("whole", "row")
    with pytest.raises(TypeError, match="Expected floating-point activations. Got torch.int64"):
        block_experts(x.long(), OFFSETS, values, columns, pointers, 48)
    with pytest.raises(ValueError, match=r"Expected rows of 48 input features. Got x \(11, 40\)"):
        block_experts(x[:, :40], OFFSETS, values, columns, pointers, 48)


def test_the_operators_are_right_for_torch_compile():
    _, values, columns, pointers, x = stack("whole", "none", torch.float32)
    arguments = x.requires_grad_(), OFFSETS, values.requires_grad_(), columns, pointers, 48
    torch.library.opcheck(torch.ops.hf_lowbit.block_experts, arguments)
