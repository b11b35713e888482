"""Rows of a low-bit table: those of the dense table, for any ids."""

import pytest
import torch

from hf_lowbit.functional.embedding import embedding
from tests.functional.layers import make_layer


def table(bits, group_size, symmetric):
    return make_layer(bits, group_size, symmetric, out_features=12, in_features=10)


def look_up(layer, ids, dtype=torch.float32):
    return embedding(ids, layer.weight.unsqueeze(0), layer.scale, layer.zero_point, layer.bits, 10, layer.block, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("group_size", [4, None, "tensor"])
@pytest.mark.parametrize(
    ("bits", "symmetric"),
    [("ternary", True), (2, False), (3, False), (4, True), (8, False)],
    ids=["ternary", "2-bits", "3-bits", "4-bits", "8-bits"],
)
def test_rows_are_those_of_the_dense_table(bits, symmetric, group_size, dtype):
    layer = table(bits, group_size, symmetric)
    ids = torch.tensor([[0, 11, 5], [5, 5, 1]])
    rows = look_up(layer, ids, dtype)
    assert rows.dtype == dtype
    assert torch.equal(rows.double(), layer.dense(dtype)[ids])


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=str)
def test_ids_of_any_shape(shape, ids_dtype):
    layer = table(4, 4, True)
    ids = torch.randint(0, 12, shape, generator=torch.Generator().manual_seed(0))
    rows = look_up(layer, ids.to(ids_dtype))
    assert rows.shape == (*shape, 10)
    assert torch.equal(rows.double(), layer.dense(torch.float32)[ids])


@pytest.mark.parametrize("bad", [12, -1, 10_000])
def test_ids_outside_the_table_are_refused(bad):
    with pytest.raises((IndexError, RuntimeError), match="index out of range|out of bounds"):
        look_up(table(4, 4, True), torch.tensor([0, bad]))


def test_nothing_that_goes_in_is_changed():
    layer, ids = table(3, 4, False), torch.tensor([3, 3, 1])
    before = [t.clone() for t in (ids, layer.weight, layer.scale, layer.zero_point)]
    look_up(layer, ids).add_(1)
    assert all(
        torch.equal(a, b) for a, b in zip((ids, layer.weight, layer.scale, layer.zero_point), before, strict=True)
    )


def test_compile_has_no_graph_break():
    torch.compiler.reset()
    layer, ids = table(4, 4, False), torch.tensor([[1, 2], [3, 4]])
    compiled = torch.compile(lambda ids: look_up(layer, ids), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids), look_up(layer, ids))
    torch.compiler.reset()
