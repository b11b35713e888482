"""Inputs of every kind through the Triton kernels in the interpreter, and the operator around them."""

import pytest
import torch

from hf_lowbit.functional.dispatch import Kernel, register_kernel, use_kernel
from hf_lowbit.functional.grid import BITS
from hf_lowbit.functional.linear import linear
from tests.kernels.triton.conditions import TILES, WORDS, in_parts, need_interpreter
from tests.kernels.triton.test_interpreted_linear import agrees, product
from tests.kernels.weights import make_weight, problem_for


need_interpreter()

# numpy, which interprets, warns of what the tests are about
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAME = "triton-interpreted"


@pytest.fixture
def on_cpu():
    """The kernel under a name that the CPU may use, forced."""
    register_kernel(Kernel(NAME, -1, lambda problem: "only for tests" if not problem.rows else None, product))
    with use_kernel(NAME):
        yield


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_any_strides(int8):
    weight = make_weight(4, 32, False, 20, 64)
    wide, columns = torch.randn(3, 128).half(), torch.randn(64, 3).half().t()
    for x in (wide[:, ::2], wide[:, 1:65], columns, wide[:1, :64].expand(3, 64), wide[:, :64].flip(0)[::2]):
        agrees(x, weight, 4, 32, int8)
    # one row whose distance to the next means nothing
    agrees(wide.as_strided((1, 64), (7, 1)), weight, 4, 32, int8)
    agrees(torch.randn(5, 1).half(), make_weight(4, None, False, 20, 1), 4, None, int8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", [1, 3])
def test_int8_rows_with_what_is_no_number_are_nan(bits, bad, rows):
    weight = make_weight(bits, 64, False, 20, 128)
    x = torch.randn(rows, 128).bfloat16()
    x[0, 70] = bad
    for plan in (TILES, WORDS) if rows == 1 else (TILES,):
        problem = problem_for(x, weight, bits, 64, 128, True)
        y = product(x, *weight, None, problem, in_parts(plan, problem, 2))
        assert y[0].isnan().all() and y[1:].isfinite().all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_float_rows_keep_what_is_no_number(bits, bad, dtype):
    weight = make_weight(bits, 64, False, 20, 128)
    x = torch.randn(3, 128).to(dtype)
    x[1, 70] = bad
    problem = problem_for(x, weight, bits, 64, 128, False)
    y = product(x, *weight, None, problem, in_parts(TILES, problem, 2))
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_rows_of_zeros(int8):
    weight, bias = make_weight(3, 64, True, 20, 128), torch.randn(20)
    for rows in (1, 4):
        y = agrees(torch.zeros(rows, 128), weight, 3, 64, int8, bias=bias)
        assert torch.equal(y, bias.expand(rows, 20))


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-6, 1e30, 3e38])
@pytest.mark.parametrize("rows", [1, 2])
def test_int8_activations_of_any_size(size, rows):
    # few and small weights: the sum must stay a number
    agrees(torch.randn(rows, 8).clamp(-1, 1) * size, make_weight(2, None, False, 9, 8), 2, None, True)
    agrees(torch.full((rows, 64), 65504.0).half(), make_weight(2, "tensor", False, 9, 64), 2, "tensor", True)


def test_longest_sums_of_int8_do_not_overflow():
    # every product is as large as it can be: 65536 of them, less zero points of the other sign
    width = 65536
    weight = (
        torch.full((1, width), -128, dtype=torch.int8),
        torch.ones(1, 1),
        torch.full((1, 1), 127, dtype=torch.int8),
    )
    for rows in (1, 2):
        x = torch.ones(rows, width)
        problem = problem_for(x, weight, 8, None, width, True)
        plan = (WORDS if rows == 1 else TILES)._replace(block_k=2048)
        y = product(x, *weight, None, problem, in_parts(plan, problem, 2))
        assert torch.equal(y, torch.full((rows, 1), -255.0 * width * 127) * torch.tensor(1 / 127))


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_nothing_to_do(int8):
    weight = make_weight(4, 32, False, 20, 64)
    for rows, taken in ((0, 20), (3, 0), (0, 0)):
        part = (weight[0][:taken], weight[1][:taken], None)
        x = torch.randn(rows, 64).bfloat16()
        y = product(x, *part, None, problem_for(x, part, 4, 32, 64, int8))
        assert y.shape == (rows, taken) and y.dtype == x.dtype


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [1, 2])
def test_weights_that_begin_anywhere(bits, rows):
    # one expert of a stack, or a view into a file's bytes
    stored, scale, zero_point = make_weight(bits, None, False, 9, 64)
    for shift in (1, 2, 3):
        moved = torch.empty(stored.numel() + shift, dtype=torch.int8)[shift:].view_as(stored).copy_(stored)
        x = torch.randn(rows, 64)
        problem = problem_for(x, (moved, scale, zero_point), bits, None, 64, True)
        y = product(x, moved, scale, zero_point, None, problem)
        assert torch.equal(y, product(x, stored, scale, zero_point, None, problem))


def test_results_do_not_depend_on_other_rows():
    weight, x = make_weight(4, 64, False, 40, 256), torch.randn(9, 256).half()
    problem = problem_for(x, weight, 4, 64, 256, False)
    y = product(x, *weight, None, problem, in_parts(TILES, problem, 3))
    for row in (0, 8):
        one = problem._replace(rows=1)
        assert torch.equal(y[row : row + 1], product(x[row : row + 1], *weight, None, one, in_parts(TILES, one, 3)))


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
def test_the_operator_and_its_gradient(on_cpu, int8):
    weight, bias = make_weight(4, 32, True, 20, 64), torch.randn(20, requires_grad=True)
    x = torch.randn(2, 3, 64, requires_grad=True)

    def layer(x, bias):
        return linear(x, *weight, bias, 4, 64, 32, int8)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y = layer(x, bias)
    assert torch.equal(compiled(x, bias), y) and y.shape == (2, 3, 20)
    with torch.no_grad():
        assert torch.equal(layer(x, bias), y)
    y.sum().backward()
    with use_kernel("reference"):
        expected = torch.autograd.grad(layer(x, bias).sum(), (x, bias))
    assert torch.equal(x.grad, expected[0]) and torch.equal(bias.grad, expected[1])


@pytest.mark.parametrize("config", [{"bits": 4, "group_size": 32}, {"bits": "ternary"}], ids=["4-bit", "ternary"])
def test_a_whole_model(on_cpu, tiny_llama, config):
    import transformers

    import hf_lowbit as lb

    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_llama, dtype=torch.float32, quantization_config=lb.LowBitConfig(**config)
    )
    ids = torch.arange(12).reshape(2, 6)
    assert {m.kernel for m in lb.report(model).modules if m.scheme is not None} == {NAME}
    with torch.no_grad():
        logits = model(ids).logits
        with use_kernel("reference"):
            expected = model(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    generated = model.generate(ids, max_new_tokens=3, do_sample=False)
    with use_kernel("reference"):
        assert torch.equal(generated, model.generate(ids, max_new_tokens=3, do_sample=False))
