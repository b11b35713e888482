"""Layers that read the same x share its preparation: who is found, when nothing is shared, and that results are
those of the layers alone, whatever happens between two of them.

`products` counts: a shared call makes the products of all layers in one call of the kernel.
"""

import copy

import pytest
import torch
from torch import nn

import hf_lowbit as lb
from hf_lowbit.functional import several
from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.kernels.cpu import library
from hf_lowbit.nn import sharing
from tests.nn.models import random
from tests.nn.neighbours import ROWS, WIDTH, Attention, alone, attention, learned, reasons


pytestmark = [
    pytest.mark.skipif(library.load().handle is None, reason="only kernels of the C library share"),
    pytest.mark.usefixtures("no_gradients"),
]


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
