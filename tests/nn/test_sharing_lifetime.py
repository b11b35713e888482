"""What layers share lives as long as their input, in one thread; copies have no part in it."""

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
from torch import nn

from hf_lowbit.kernels.cpu import library
from hf_lowbit.nn import sharing
from tests.nn.models import random
from tests.nn.neighbours import ROWS, WIDTH, alone, attention, learned


pytestmark = [
    pytest.mark.skipif(library.load().handle is None, reason="only kernels of the C library share"),
    pytest.mark.usefixtures("no_gradients"),
]


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
