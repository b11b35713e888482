"""Layers that read the same x share its preparation: who is found, when nothing is shared, and that results are those
of the layers alone, whatever happens between two of them.

`products` counts: a shared call makes the products of all layers in one call of the kernel.
"""

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
from torch import nn

import hf_lowbit as lb
from hf_lowbit.functional import several
from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.kernels import separate_products
from hf_lowbit.kernels.cpu import library
from hf_lowbit.nn import sharing
from tests.nn.models import random


pytestmark = pytest.mark.skipif(library.load().handle is None, reason="only kernels of the C library share")
WIDTH, ROWS = 64, sharing.FEWEST_ROWS


class Attention(nn.Module):
    """q, k and v read x, o reads what they give."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, n) for n in (WIDTH, 32, 32, WIDTH))

    def forward(self, x, between=lambda: None):
        q = self.q(x)
        between()
        k, v = self.k(x), self.v(x)
        return self.o(q + torch.cat([k, v], -1))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def products(monkeypatch):
    """Numbers of weights of the shared calls since the last look."""
    counts = []

    def count(x, weights, *rest):
        results = several.linear_several(x, weights, *rest)
        if not isinstance(results, str):
            counts.append(len(weights))
        return results

    def look():
        seen = list(counts)
        counts.clear()
        return seen

    monkeypatch.setattr(sharing, "linear_several", count)
    return look


def attention(bits=4, group_size=32, **fields):
    return lb.quantize(Attention().eval(), lb.LowBitConfig(bits=bits, group_size=group_size, **fields))


def learned(**fields):
    """A model that has seen enough calls to know who reads the same input, and to give up on `o`."""
    model = attention(**fields)
    for seed in range(sharing.TRIES + 1):
        model(random(1, ROWS, WIDTH, seed=seed))
    return model


def alone(model, x, *rest):
    with separate_products():
        return model(x, *rest)


def reasons(model):
    return {row.name: row.sharing for row in lb.report(model).modules if row.scheme is not None}


def test_who_reads_the_same_input_is_found_at_the_second_call(products):
    model = attention()
    model(random(1, ROWS, WIDTH))
    assert products() == []
    x = random(1, ROWS, WIDTH, seed=1)
    y = model(x)
    assert products() == [3]
    assert torch.equal(y, alone(model, x)) and products() == []


@pytest.mark.parametrize("fields", [{}, {"bits": "ternary"}, {"bits": 3}, {"bits": 8, "group_size": None}], ids=str)
@pytest.mark.parametrize("rows", [0, 1, sharing.FEWEST_ROWS - 1, sharing.FEWEST_ROWS, 17, 512])
def test_bits_are_those_of_the_layers_alone(fields, rows, products):
    model = learned(**fields)
    products()
    for dtype in (torch.float32, torch.bfloat16):
        x = random(1, rows, WIDTH, dtype=dtype)
        model.to(dtype)
        assert torch.equal(model(x), alone(model, x))
        assert products() == ([3] if rows >= sharing.FEWEST_ROWS else [])


def test_the_report_says_who_shares():
    assert set(reasons(attention()).values()) == {None}
    model = learned()
    found = reasons(model)
    assert found["q.weight"] == "from 16 rows on prepares its input for `k`, `v` too"
    assert found["k.weight"] == found["v.weight"] == "from 16 rows on its input is prepared by `q`"
    assert "no other layer" in found["o.weight"]
    assert "from 16 rows on prepares its input for `k`, `v` too" in str(lb.report(model))


def test_layers_of_other_schemes_do_not_follow(products):
    model = Attention().eval()
    modules = {"q": lb.Scheme(4, 32), "k": lb.Scheme(8, 32), "v": lb.Scheme(4, 32), "o": lb.Scheme(8, 32)}
    lb.quantize(model, lb.LowBitConfig(modules=modules))
    for seed in range(5):
        x = random(1, ROWS, WIDTH, seed=seed)
        assert torch.equal(model(x), alone(model, x))
    assert set(products()) == {2}
    assert (
        reasons(model)["v.weight"] == "from 16 rows on its input is prepared by `q`"
        and "no other layer" in reasons(model)["k.weight"]
    )


def write_to_input(model, x):
    x.mul_(2)


def write_to_weight(model, x):
    model.k.weight_scale.mul_(2)


def replace_weight(model, x):
    model.v.bias = nn.Parameter(torch.ones_like(model.v.bias), requires_grad=False)


@pytest.mark.parametrize("change", [write_to_input, write_to_weight, replace_weight], ids=lambda f: f.__name__)
def test_changes_between_two_layers_are_seen(change, products):
    model = learned()
    products()
    x = random(1, ROWS, WIDTH, seed=9)
    expected_model, expected_x = copy.deepcopy(model), x.clone()
    expected = alone(expected_model, expected_x, lambda: change(expected_model, expected_x))
    assert torch.equal(model(x, lambda: change(model, x)), expected)
    assert products() == [3]


@pytest.mark.parametrize("form", [lambda x: x.resize_(1, ROWS - 1, WIDTH), lambda x: setattr(x, "data", x.data * 3)],
                         ids=["resized", "other-data"])  # fmt: skip
def test_a_tensor_that_became_another_is_seen(form):
    model = learned()
    x = random(1, ROWS, WIDTH)
    model.q(x)
    form(x)
    assert torch.equal(model.k(x), alone(model.k, x))


def test_a_forced_kernel_computes_what_it_is_asked_for(products):
    model = learned()
    x = random(1, ROWS, WIDTH)
    products()
    model.q(x)
    assert products() == [3]
    with use_kernel("reference"):
        assert torch.equal(model.k(x), alone(model.k, x))
        assert not torch.equal(model.k(x), model.v(x))
        # what nobody took is forgotten, and learned anew
        for seed in range(2):
            model(random(1, ROWS, WIDTH, seed=seed))
        assert products() == [] and "reference" in reasons(model)["q.weight"]


def test_switched_off(products, monkeypatch):
    model = learned()
    products()
    monkeypatch.setenv(several.ENVIRONMENT_VARIABLE, "0")
    model(random(1, ROWS, WIDTH))
    assert products() == [] and "switched off" in reasons(model)["q.weight"]
    monkeypatch.setenv(several.ENVIRONMENT_VARIABLE, "1")
    model(random(1, ROWS, WIDTH))
    assert products() == [3]


def test_gradients_autocast_and_inference_mode_share_nothing(products):
    model = learned()
    products()
    x = random(1, ROWS, WIDTH)
    with torch.enable_grad():
        z = x.clone().requires_grad_()
        model(z).sum().backward()
        assert z.grad is not None
        model(x)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert products() == []
    with torch.inference_mode():
        model(random(1, ROWS, WIDTH))
    assert products() == [] and "inference mode" in reasons(model)["q.weight"]


def test_hooks(products):
    model, seen = learned(), []
    products()
    x = random(1, ROWS, WIDTH)
    # outputs may be watched
    handle = model.k.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    assert torch.equal(model(x), alone(model, x)) and products() == [3] and len(seen) == 2
    handle.remove()
    handle = model.k.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    expected = alone(model, x)
    assert torch.equal(model(x), expected) and products() == []
    assert "pre-hooks" in reasons(model)["q.weight"]
    handle.remove()
    x = random(1, ROWS, WIDTH, seed=3)
    assert torch.equal(model(x), alone(model, x)) and products() == [3]


def test_a_hook_that_changes_the_input_of_the_head(products):
    model = learned()
    model.q.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    for seed in range(3 * sharing.TRIES):
        x = random(1, ROWS, WIDTH, seed=seed)
        assert torch.equal(model(x), alone(model, x))
    products()
    # k and v have found each other
    model(random(1, ROWS, WIDTH))
    assert products() == [2]


def test_products_that_nobody_takes_end_the_sharing(products):
    model = learned()
    for seed in range(20):
        x = random(1, ROWS, WIDTH, seed=seed)
        assert torch.equal(model.q(x), alone(model.q, x))
        if seed % 3:
            # learns once more that k follows
            assert torch.equal(model.k(x), alone(model.k, x))
    assert 0 < len(products()) <= 3 * sharing.TRIES
    assert "each time" in reasons(model)["q.weight"]
    for seed in range(3):
        x = random(1, ROWS, WIDTH, seed=seed)
        assert torch.equal(model(x), alone(model, x))
    assert products() == []


def test_products_go_with_the_input():
    model = learned()
    x = random(1, ROWS, WIDTH)
    model.q(x)
    waiting = [weakref.ref(product[0]) for product in sharing._thread.input.products.values()]
    assert len(waiting) == 2 and all(ref() is not None for ref in waiting)
    del x
    assert all(ref() is None for ref in waiting)


def test_layers_and_inputs_are_not_kept_alive():
    model = learned()
    x = random(1, ROWS, WIDTH)
    model(x)
    seen = weakref.ref(x), weakref.ref(model.q), weakref.ref(model.k), weakref.ref(model.k.weight)
    del model, x
    gc.collect()
    assert [ref() for ref in seen] == [None] * 4


def test_copies_and_pickles_hold_ordinary_layers(products):
    model = learned()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = random(1, ROWS, WIDTH)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False), copy.copy(model)):
        assert set(other.state_dict()) == set(attention().state_dict())
        assert torch.equal(other(x), alone(model, x))
    alone_copy = copy.deepcopy(model.k)
    assert alone_copy.__dict__["sharing"] is None and torch.equal(alone_copy(x), model.k(x))
    other = copy.deepcopy(model)
    products()
    for seed in range(2):
        other(random(1, ROWS, WIDTH, seed=seed))
    assert products() == [3]


def test_a_layer_that_became_dense_is_left_out(products):
    from hf_lowbit.nn.swap import restore_dense

    model, x = learned(), random(1, ROWS, WIDTH)
    restore_dense([model.k], torch.float32)
    products()
    for seed in range(3):
        x = random(1, ROWS, WIDTH, seed=seed)
        assert torch.equal(model(x), alone(model, x))
    assert "sharing" not in model.k.__dict__ and set(products()) == {2}


def test_a_layer_whose_weights_are_elsewhere_is_left_out(products):
    model = learned()
    products()
    x = random(1, ROWS, WIDTH)
    weight = model.k.weight
    model.k.weight = nn.Parameter(weight.to("meta"), requires_grad=False)

    def fetch():
        model.k.weight = weight

    assert torch.equal(model(x, fetch), alone(model, x)) and products() == []


def test_threads_share_a_model():
    model, wrong = attention(), []
    inputs = [random(1, ROWS + i % 3, WIDTH, seed=i) for i in range(8)]
    expected = [alone(model, x) for x in inputs]

    def work(start):
        with torch.no_grad():
            for i in range(start, start + 60):
                if not torch.equal(model(inputs[i % 8]), expected[i % 8]):
                    wrong.append(i)

    workers = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_product_is_for_the_thread_that_made_it(products):
    model = learned()
    x = random(1, ROWS, WIDTH)
    model.q(x)
    products()
    results = []

    def work():
        with torch.no_grad():
            results.append(model.k(x))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert len(sharing._thread.input.products) == 2
    assert torch.equal(results[0], model.k(x))
    assert len(sharing._thread.input.products) == 1
