"""Rows of a packed weight as numbers: the formula's, bit for bit, by whichever kernel runs and as an operator."""

import pytest
import torch

from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.functional.rows import FIELD, RowKernel, choose_rows, reference_rows, register_rows, rows_of
from hf_lowbit.functional.rows import _kernels as kernels
from tests.functional.layers import make_layer, random


SCHEMES = pytest.mark.parametrize(
    ("bits", "symmetric"),
    [("ternary", True), (2, False), (3, False), (3, True), (4, True), (4, False), (8, False), (8, True)],
    ids=["ternary", "2-zero", "3-zero", "3", "4", "4-zero", "8-zero", "8"],
)


def rows(layer, ids=None, dtype=torch.float32):
    return rows_of(layer.weight, layer.scale, layer.zero_point, ids, layer.bits, layer.in_features, layer.block, dtype)


@SCHEMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("group_size", [4, 7, None, "tensor"])
def test_numbers_are_those_of_the_formula(bits, symmetric, group_size, dtype):
    for in_features in (1, 10, 37):
        layer = make_layer(bits, group_size, symmetric, out_features=6, in_features=in_features)
        assert torch.equal(rows(layer, dtype=dtype).double(), layer.dense(dtype))
        ids = torch.tensor([5, 0, 0, 3])
        assert torch.equal(rows(layer, ids, dtype).double(), layer.dense(dtype)[ids])


def test_strided_weights_and_ids():
    layer = make_layer(4, 4, False, out_features=8)
    wide = torch.cat([layer.weight, layer.weight], dim=1)[:, : layer.weight.shape[1]]
    ids = torch.tensor([1, 9, 7, 9, 0])[::2]
    strided = layer._replace(weight=wide, scale=layer.scale.t().contiguous().t())
    assert torch.equal(rows(strided, ids), rows(layer)[ids])


def test_a_weight_of_another_width_is_refused():
    with pytest.raises(ValueError, match="Expected 5 bytes a row"):
        rows_of(torch.zeros(2, 6, dtype=torch.int8), torch.ones(2, 1), None, None, 4, 10)


@pytest.mark.parametrize("bad", [8, -1])
def test_ids_outside_are_refused(bad):
    with pytest.raises(IndexError, match="index out of range"):
        rows(make_layer(out_features=8), torch.tensor([0, bad]))


@pytest.mark.parametrize("ids", [None, torch.tensor([1, 0, 1])], ids=["all", "some"])
@pytest.mark.parametrize(("bits", "group_size"), [("ternary", "tensor"), (3, 4), (8, None)])
def test_torch_finds_the_operator_correct(bits, group_size, ids):
    layer = make_layer(bits, group_size, bits == "ternary")
    arguments = layer.weight, layer.scale, layer.zero_point, ids, FIELD[bits], 10, layer.block or 0, torch.bfloat16
    torch.library.opcheck(torch.ops.hf_lowbit.rows.default, arguments)


def test_a_forced_kernel_without_rows_leaves_them_to_the_definition():
    chosen = []
    spy = RowKernel(
        "spy", 10_000, lambda r: None, lambda *a: chosen.append(choose_rows(a[-1]).name) or reference_rows(*a)
    )
    before = list(kernels)
    try:
        register_rows(spy)
        rows(make_layer())
        with use_kernel("reference"):
            rows(make_layer())
        assert chosen == ["spy"]
    finally:
        register_rows(spy._replace(refuse=lambda r: "the test is over"))
        kernels[:] = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@SCHEMES
def test_the_gradient_to_x_is_that_of_the_dense_weight(bits, symmetric, dtype):
    layer = make_layer(bits, 4, symmetric, out_features=9, in_features=21)
    x, grad = random(3, 21, dtype=dtype).requires_grad_(), random(3, 9, dtype=dtype)
    layer(x).backward(grad)
    assert torch.equal(x.grad, grad @ layer.dense(dtype).to(dtype))
