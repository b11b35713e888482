"""The Triton kernels on the device itself: `HF_LOWBIT_DEVICE=cuda make test`. Skipped without one."""

import os

import pytest
import torch

from hf_lowbit.functional.dispatch import choose
from hf_lowbit.functional.grid import BITS
from hf_lowbit.functional.linear import linear, quantize_activations
from hf_lowbit.kernels.triton import NAME, refuse_machine
from tests.kernels import test_cpu_update as updates
from tests.kernels.weights import expected_and_size, make_weight, problem_for, run


# sums are float32, in another order than the reference's; relative to the root of the summed squares of the terms
FLOAT_SUM = 16 * torch.finfo(torch.float32).eps
# W may be rounded to x's dtype, and the result is
ROUNDINGS = 2.0
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


if not os.environ.get("HF_LOWBIT_DEVICE", "").startswith("cuda"):
    pytest.skip("needs HF_LOWBIT_DEVICE=cuda", allow_module_level=True)


@pytest.fixture
def gpu(device):
    refusal = refuse_machine()
    if refusal is not None:
        pytest.skip(refusal)
    torch.manual_seed(0)
    return device


def to(device, tensors):
    return tuple(None if tensor is None else tensor.to(device) for tensor in tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_agrees_with_the_definition(gpu, bits, int8, dtype):
    for group, asymmetric in ((64, False), (128, bits != "ternary"), (None, bits != "ternary"), ("tensor", False)):
        for out_features, in_features in ((512, 1024), (130, 416), (33, 77)):
            weight = make_weight(bits, group, asymmetric, out_features, in_features)
            bias = torch.randn(out_features).to(dtype)
            for rows in (0, 1, 2, 15, 16, 17, 64, 300):
                x = torch.randn(rows, in_features).to(dtype)
                y = run(NAME, x.to(gpu), to(gpu, weight), bias.to(gpu), bits, group, int8).cpu()
                expected, size = expected_and_size(x, weight, bits, group, bias, int8)
                rounding = ROUNDINGS * torch.finfo(dtype).eps * (size + expected.abs())
                assert ((y.to(torch.float64) - expected).abs() <= rounding + FLOAT_SUM * size).all()


def test_it_is_what_runs(gpu):
    weight = to(gpu, make_weight(4, 64, False, 64, 128))
    problem = problem_for(torch.randn(1, 128, device=gpu), weight, 4, 64, 128, False)
    choice = choose(problem)
    assert choice.kernel.name == NAME and choice.reason.startswith("tensor cores on tiles of")


@pytest.mark.parametrize("planes", [1, 4])
def test_activations_are_quantized_as_by_the_reference(gpu, planes):
    from hf_lowbit.kernels.triton.product import quantize

    x = torch.cat([torch.randn(64, 1000) * 3, torch.zeros(1, 1000), torch.full((1, 1000), float("nan"))])
    codes, token_scale = quantize(x.to(gpu), planes)
    expected, t = quantize_activations(x)
    flat = codes.cpu().transpose(1, 2).flatten(1)[:, :1000]
    assert torch.equal(flat[:-1], expected[:-1])
    torch.testing.assert_close(token_scale.cpu(), t[:, 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(gpu, bad, int8):
    weight = to(gpu, make_weight(4, 64, False, 64, 512))
    for rows in (1, 3):
        x = torch.randn(rows, 512, device=gpu).bfloat16()
        x[0, 70] = bad
        y = run(NAME, x, weight, None, 4, 64, int8)
        assert not y[0].isfinite().any() and y[1:].isfinite().all()


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_a_graph_replays_it(gpu, rows, int8):
    weight = to(gpu, make_weight(4, 64, False, 256, 4096))
    x, other = torch.randn(2, rows, 4096, device=gpu).half()

    def layer():
        return run(NAME, x, weight, None, 4, 64, int8)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer()
    x.copy_(other)
    graph.replay()
    # sums have a fixed order: equal to the bit, again and again
    assert torch.equal(y, layer()) and torch.equal(layer(), layer())


def test_it_never_waits_for_the_device(gpu):
    weight = to(gpu, make_weight(4, 64, True, 256, 1024))
    for rows, int8 in ((1, True), (1, False), (64, True), (64, False)):
        x = torch.randn(rows, 1024, device=gpu).half()
        run(NAME, x, weight, None, 4, 64, int8)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(NAME, x, weight, None, 4, 64, int8)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_compiled_with_graphs(gpu):
    weight = to(gpu, make_weight(4, 64, False, 256, 1024))

    def layer(x):
        return torch.relu(linear(x, *weight, None, 4, 1024, 64))

    x = torch.randn(2, 5, 1024, device=gpu).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            y = compiled(x).clone()
        assert torch.equal(y, layer(x))


def test_tensors_of_another_device_than_the_current_one(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    weight, x = make_weight(4, 64, False, 64, 512), torch.randn(3, 512)
    first = run(NAME, x.to("cuda:0"), to("cuda:0", weight), None, 4, 64, False)
    second = run(NAME, x.to("cuda:1"), to("cuda:1", weight), None, 4, 64, False)
    assert second.device.index == 1 and torch.equal(first.cpu(), second.cpu())


@pytest.mark.parametrize("state_bits", [32, 16, 8, 4])
@pytest.mark.parametrize("rule", sorted(updates.RULES))
def test_updates_have_the_bits_of_the_definition(gpu, rule, state_bits):
    for scheme in (("ternary", None, False), (2, 32, True), (3, 5, True), (4, 64, False), (8, "tensor", False)):
        for columns in (40, 192, 1536):
            arguments = scheme, rule, state_bits, (67, columns), torch.bfloat16
            expected = updates.run("reference", *arguments)
            updates.assert_same(updates.run(NAME, *arguments, device=gpu), expected)
