"""Optimizer directions against torch.optim itself: the same steps on a float weight."""

import pytest
import torch

from hf_lowbit.training.rules import RULES, make_rule


# float32 in another order of operations
TOLERANCE = 2e-6
STEPS = 12
# LARS and LAMB give steps in place of directions: tests/functional/test_trust.py, test_layerwise.py
DIRECTIONS = sorted(name for name, rule in RULES.items() if not getattr(rule, "layerwise", False))


def torch_optimizer(name, parameter):
    if name == "adamw":
        return torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    if name == "adafactor":
        return torch.optim.Adafactor([parameter], lr=0.01, weight_decay=0.0)
    return torch.optim.SGD([parameter], lr=0.01, momentum=0.9, nesterov=name == "nesterov")


def our_rule(name):
    options = {"adamw": {"betas": (0.9, 0.95)}, "nesterov": {"momentum": 0.9, "nesterov": True}}.get(name, {})
    return make_rule("sgd" if name == "nesterov" else name, options)


def run(rule, weight, grads, lr=0.01):
    shapes = {name: (weight.shape[0], 1) if dim == 1 else (1, weight.shape[1]) for name, dim in rule.vectors.items()}
    moments = {name: torch.zeros(shapes.get(name, weight.shape)) for name in (*rule.moments, *rule.vectors)}
    for t, grad in enumerate(grads, 1):
        u, moments = rule.direction(grad, moments, t)
        rms = float(weight.norm(2)) / weight.numel() ** 0.5
        weight = weight - rule.rate(lr, t, lambda rms=rms: rms, u) * u
    return weight


@pytest.mark.parametrize("shape", [(7, 13), (1, 20), (20, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("name", ["adamw", "sgd", "nesterov", "adafactor"])
def test_steps_are_those_of_torch(name, shape):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator)
    grads = [torch.randn(shape, generator=generator) * 10 ** (-(t % 4)) for t in range(STEPS)]
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch_optimizer(name, parameter)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    found = run(our_rule(name), weight, grads)
    assert (found - parameter.detach()).abs().max() < TOLERANCE * max(1.0, float(weight.abs().max()))


def test_lion_is_algorithm_2_of_its_paper():
    generator = torch.Generator().manual_seed(1)
    weight, m = torch.randn(5, 6, generator=generator), torch.zeros(5, 6)
    grads = [torch.randn(5, 6, generator=generator) for _ in range(STEPS)]
    expected = weight.clone()
    for grad in grads:
        expected -= 0.01 * torch.sign(0.9 * m + 0.1 * grad)
        m = 0.99 * m + 0.01 * grad
    assert (run(our_rule("lion"), weight, grads) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", DIRECTIONS)
def test_arguments_are_left_alone(name):
    rule = our_rule(name)
    grad = torch.randn(4, 6)
    shapes = {n: (4, 1) if dim == 1 else (1, 6) for n, dim in rule.vectors.items()}
    moments = {n: torch.rand(shapes.get(n, (4, 6))) for n in (*rule.moments, *rule.vectors)}
    kept = grad.clone(), {n: m.clone() for n, m in moments.items()}
    rule.direction(grad, moments, 2)
    assert torch.equal(grad, kept[0])
    assert all(torch.equal(m, kept[1][n]) for n, m in moments.items())


@pytest.mark.parametrize("name", DIRECTIONS)
def test_no_gradient_no_direction(name):
    """A row that never saw a gradient is never moved."""
    rule = our_rule(name)
    shapes = {n: (4, 1) if dim == 1 else (1, 6) for n, dim in rule.vectors.items()}
    moments = {n: torch.zeros(shapes.get(n, (4, 6))) for n in (*rule.moments, *rule.vectors)}
    grad = torch.zeros(4, 6)
    grad[1] = 1.0
    for t in (1, 2, 3):
        u, moments = rule.direction(grad, moments, t)
        assert torch.isfinite(u).all() and not u[[0, 2, 3]].any() and u[1].any()


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("adam", {}, "`optimizer`='adam'"),
        ("adamw", {"momentum": 0.9}, "no option `momentum`"),
        ("adamw", {"betas": (0.9, 1.0)}, "`betas`"),
        ("lion", {"betas": (0.9,)}, "`betas`"),
        ("sgd", {"momentum": 1.0}, "`momentum`"),
    ],
)
def test_wrong_options_are_named(name, options, match):
    with pytest.raises((TypeError, ValueError), match=match):
        make_rule(name, options)
