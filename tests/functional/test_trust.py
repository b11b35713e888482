"""LARS and LAMB: six lines of the published algorithms, under warmup and decay, and what the ratios do at zero."""

import math

import pytest
import torch

from hf_lowbit.functional.trust import lamb, lars, lars_ratio, trust_ratio


# float32 in another order of operations
TOLERANCE = 1e-6
STEPS = 20


def rates(peak=2.0, warmup=5):
    """Linear warmup, then power 2."""
    return [peak * min(t / warmup, (1 - (t - warmup) / STEPS) ** 2 if t > warmup else 1) for t in range(1, STEPS + 1)]


def tensors(seed=0, shape=(7, 13)):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    return weight, [torch.randn(shape, generator=generator) * 10.0 ** -(t % 3) for t in range(STEPS)]


def by_hand_lars(w, grads, mu, eta, eps, wd):
    w, v = w.double(), torch.zeros_like(w, dtype=torch.float64)
    for g, lr in zip(grads, rates(), strict=True):
        g = g.double()
        lam = eta * w.norm() / (g.norm() + wd * w.norm() + eps)
        v = mu * v + lr * lam * (g + wd * w)
        w = w - v
    return w.float()


def by_hand_lamb(w, grads, b1, b2, eps, wd):
    w, m, v = w.double(), 0.0, 0.0
    for t, (g, lr) in enumerate(zip(grads, rates(0.1), strict=True), 1):
        m, v = b1 * m + (1 - b1) * g.double(), b2 * v + (1 - b2) * g.double() ** 2
        r = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + eps) + wd * w
        w = w - lr * w.norm() / r.norm() * r
    return w.float()


@pytest.mark.parametrize("wd", [0.0, 1e-2], ids=["no-decay", "decay"])
@pytest.mark.parametrize("eps", [0.0, 1e-3], ids=["no-eps", "eps"])
def test_lars_is_the_reference(wd, eps):
    weight, grads = tensors()
    w, v = weight, torch.zeros_like(weight)
    for grad, lr in zip(grads, rates(), strict=True):
        step, v = lars(grad, w, v, lr, 0.9, 0.001, eps, wd)
        w = w - step
    assert (w - by_hand_lars(weight, grads, 0.9, 0.001, eps, wd)).abs().max() < TOLERANCE * weight.abs().max()


@pytest.mark.parametrize("wd", [0.0, 1e-2], ids=["no-decay", "decay"])
def test_lamb_is_algorithm_2_of_its_paper(wd):
    weight, grads = tensors()
    w, m, v = weight, torch.zeros_like(weight), torch.zeros_like(weight)
    for t, (grad, lr) in enumerate(zip(grads, rates(0.1), strict=True), 1):
        step, m, v = lamb(grad, w, m, v, t, lr, (0.9, 0.99), 1e-6, wd)
        w = w - step
    # twenty steps of up to a tenth of the weight each
    assert (w - by_hand_lamb(weight, grads, 0.9, 0.99, 1e-6, wd)).abs().max() < 10 * TOLERANCE * weight.abs().max()


def test_the_learning_rate_inside_the_momentum_matters_when_it_changes():
    weight, grads = tensors()
    ways = {}
    for inside in (True, False):
        for name, schedule in (("constant", [1.0] * STEPS), ("decaying", rates())):
            w, v = weight, torch.zeros_like(weight)
            for grad, lr in zip(grads, schedule, strict=True):
                step, v = lars(grad, w, v, lr, 0.9, 0.001, 0.0, 0.0, lr_in_momentum=inside)
                w = w - step
            ways[name, inside] = w - weight
    moved = ways["constant", True].norm()
    assert (ways["constant", True] - ways["constant", False]).norm() < 1e-5 * moved
    assert (ways["decaying", True] - ways["decaying", False]).norm() > 0.05 * ways["decaying", True].norm()


def test_a_ratio_is_one_where_a_norm_is_zero():
    zero, one = torch.tensor(0.0), torch.tensor(2.0)
    assert trust_ratio(zero, one) == trust_ratio(one, zero) == 1
    # no gradient: only decay is left, at the plain rate, as in the reference
    assert lars_ratio(one, zero, 0.001, 0.0, 0.1) == lars_ratio(zero, one, 0.001, 0.0, 0.1) == 1
    assert lars_ratio(one, one, 0.001, 0.0, 0.5) == pytest.approx(0.001 * 2 / 3)


def test_layers_that_are_not_adapted_have_the_plain_step():
    weight, grads = tensors()
    step, _ = lars(grads[0], None, torch.zeros_like(weight), 0.5, 0.9, 0.001, 0.0, 0.1)
    assert torch.equal(step, 0.5 * grads[0])
    step, _, _ = lamb(grads[0], None, torch.zeros_like(weight), torch.zeros_like(weight), 1, 0.5, (0.9, 0.99), 0, 0.1)
    assert torch.allclose(step, 0.5 * grads[0].sign(), atol=1e-6)


def test_arguments_are_left_alone():
    weight, grads = tensors()
    given = [grads[0], weight, torch.rand_like(weight), torch.rand_like(weight)]
    kept = [tensor.clone() for tensor in given]
    lars(*given[:3], 1.0, 0.9, 0.001, 0.0, 0.1)
    lars(*given[:3], 1.0, 0.9, 0.001, 0.0, 0.1, False)
    lamb(*given, 3, 1.0, (0.9, 0.99), 1e-6, 0.1)
    assert all(torch.equal(one, other) for one, other in zip(given, kept, strict=True))


def test_every_layer_moves_by_the_same_share_of_its_norm():
    for size in (0.01, 1.0, 100.0):
        weight, grads = tensors()
        step, _ = lars(grads[0] * 7, weight * size, torch.zeros_like(weight), 1.0, 0.9, 0.001, 0.0, 0.0)
        assert math.isclose(float(step.norm() / (weight * size).norm()), 0.001, rel_tol=1e-5)
