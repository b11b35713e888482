"""SwiGLU of two products with live blocks that share a mask, against the dense one and its gradients."""

import pytest
import torch
import torch.nn.functional as F

import hf_lowbit.kernels  # noqa: F401
from hf_lowbit.functional.block_masks import gather
from hf_lowbit.functional.block_swiglu import block_swiglu
from hf_lowbit.functional.blocks import dense_of
from tests.kernels.test_cpu_blocks import weights


@pytest.mark.parametrize("balance", ["row", "none"])
def test_products_and_gradients(balance):
    gate, values, columns, pointers = weights((70, 90), (8, 24), balance, torch.float64)
    other = torch.randn_like(values)
    leaves = [t.clone().requires_grad_() for t in (values, other)]
    x = torch.randn(2, 3, 90, dtype=torch.float64, requires_grad=True)
    h = block_swiglu(x, *leaves, columns, 90, pointers)
    up = dense_of(other, columns, pointers, 90)
    dense = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    wide = x.detach().clone().requires_grad_()
    expected = F.silu(F.linear(wide, dense[0])) * F.linear(wide, dense[1])
    torch.testing.assert_close(h, expected)
    gradient = torch.randn_like(h)
    h.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(x.grad, wide.grad)
    for leaf, whole in zip(leaves, dense, strict=True):
        torch.testing.assert_close(leaf.grad, gather(whole.grad, columns, pointers, (8, 24)))


def test_refusals():
    _, values, columns, pointers = weights((64, 96), (32, 32), "row", torch.float32)
    with pytest.raises(TypeError, match="floats of one dtype"):
        block_swiglu(torch.randn(2, 96).half(), values, values, columns, 96)
    with pytest.raises(ValueError, match="Expected 96 input features"):
        block_swiglu(torch.randn(2, 95), values, values, columns, 96)
    with pytest.raises(ValueError, match="blocks of one shape"):
        block_swiglu(torch.randn(2, 96), values, values[:1], columns, 96)
