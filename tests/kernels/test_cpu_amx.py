"""Matrix tiles: shapes around their edges, and a life beside torch, which uses the same tiles in its own way."""

import threading

import pytest
import torch
import torch.nn.functional as F

from hf_lowbit.kernels.cpu import TIERS, library
from tests.kernels.weights import dense, expected_and_size, make_weight, run


AMX = "cpu-amx"


@pytest.fixture(autouse=True)
def _needs_tiles():
    loaded = library.load()
    if loaded.handle is None or not loaded.features & TIERS[AMX][2]:
        pytest.skip("the processor has no matrix tiles")
    torch.manual_seed(0)


# tiles have 16 rows, a pass 32 of W and of x, a chunk 256 or 128 columns; more rows of x than a pass use the panel
@pytest.mark.parametrize("rows", [5, 15, 16, 17, 31, 32, 33, 64, 65, 130])
@pytest.mark.parametrize(("out_features", "in_features"), [(16, 64), (31, 128), (33, 257), (70, 300), (1, 31)])
@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_edges_of_tiles(rows, out_features, in_features, int8):
    for bits, group, asymmetric in [
        (4, 64, True),
        (3, 96, True),
        (8, 32, True),
        ("ternary", "tensor", False),
        (2, 128, True),
    ]:
        weight = make_weight(bits, group, asymmetric, out_features, in_features)
        x = torch.randn(rows, in_features).bfloat16()
        y = run(AMX, x, weight, None, bits, group, int8)
        expected, size = expected_and_size(x, weight, bits, group, None, int8)
        eps = torch.finfo(torch.bfloat16).eps
        bound = eps * expected.abs() + (0 if int8 else eps) * size + 4e-6 * (size + 4)
        assert ((y.to(torch.float64) - expected).abs() <= bound).all(), (bits, group)


# slabs of columns, panels of W that share one, the last tile of x alone, more rows of x than share a widening
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"), [(300, 40, 8192), (131, 300, 8200), (545, 33, 2112), (1041, 20, 2081)]
)
@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_more_rows_than_fit_a_cache(rows, out_features, in_features, int8):
    for bits, group, asymmetric in [(4, 64, True), (3, 96, True), (8, None, True), ("ternary", "tensor", False)]:
        weight = make_weight(bits, group, asymmetric, out_features, in_features)
        x, bias = torch.randn(rows, in_features).bfloat16(), torch.randn(out_features).bfloat16()
        y = run(AMX, x, weight, bias, bits, group, int8)
        expected, size = expected_and_size(x, weight, bits, group, bias, int8)
        eps = torch.finfo(torch.bfloat16).eps
        assert ((y.to(torch.float64) - expected).abs() <= eps * (expected.abs() + size)).all(), (bits, group)
        # sums that wait between slabs lose nothing: few rows, which have no slabs, give the same bits
        assert torch.equal(y[:32], run(AMX, x[:32], weight, bias, bits, group, int8)), (bits, group)


def test_products_of_torch_in_between():
    # torch configures the tiles for itself and may think that nobody else does
    weight, other = make_weight(4, 64, False, 256, 512), torch.randn(256, 512).bfloat16()
    x = torch.randn(64, 512).bfloat16()
    expected_torch, expected_ours = F.linear(x, other), run(AMX, x, weight, None, 4, 64, True)
    for _ in range(5):
        assert torch.equal(F.linear(x, other), expected_torch)
        assert torch.equal(run(AMX, x, weight, None, 4, 64, True), expected_ours)


def test_threads_of_python_at_once():
    weight = make_weight(4, 64, True, 300, 512)
    x = torch.randn(40, 512).bfloat16()
    expected = run(AMX, x, weight, None, 4, 64, False)
    different = []

    def work():
        for _ in range(20):
            if not torch.equal(run(AMX, x, weight, None, 4, 64, False), expected):
                different.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not different


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_not_finite_rows_stay_alone(int8):
    weight = make_weight(4, 64, False, 48, 256)
    x = torch.randn(40, 256).bfloat16()
    clean = run(AMX, x, weight, None, 4, 64, int8)
    x[3, 7], x[20, 200] = float("nan"), float("inf")
    y = run(AMX, x, weight, None, 4, 64, int8)
    assert not y[[3, 20]].isfinite().any(dim=1).any() or int8 is False
    assert y[3].isnan().all()
    kept = [i for i in range(40) if i not in (3, 20)]
    assert torch.equal(y[kept], clean[kept])
    reference = F.linear(x.float(), dense(weight, 4, 64, 256))
    if not int8:
        assert torch.equal(y[20].isnan() | y[20].isinf(), reference[20].isnan() | reference[20].isinf())
