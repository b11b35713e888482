"""One direct update against the definition, written down naively; and what must not change it: chunks, threads."""

import pytest
import torch

import hf_lowbit as lb
from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.functional.grid import expand_groups, grid_of
from hf_lowbit.functional.noise import column_words, key_of, row_words, uniform, words
from hf_lowbit.training import step as step_module
from hf_lowbit.training.leaves import CodesLeaf, FloatLeaf, ScaleLeaf, make_leaf
from hf_lowbit.training.rules import RULES, make_rule
from hf_lowbit.training.states import STATE_BITS, States
from hf_lowbit.training.step import step_leaf


GRIDS = [("ternary", None), (2, "tensor"), (3, None), (4, 16), (8, None), (8, 24)]


def layer(bits, group_size, scale="fixed", shape=(30, 50)):
    torch.manual_seed(0)
    linear = torch.nn.Linear(shape[1], shape[0], bias=False)
    torch.nn.init.normal_(linear.weight, std=0.02)
    return lb.quantize(torch.nn.Sequential(linear), lb.DQTConfig(bits=bits, group_size=group_size, scale=scale))[0]


def grad_of(module, seed=1):
    return torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(seed)) * 1e-2


def expected_codes(module, name, lr, decay, seed, step):
    """q + sign(d) ceil(|d| - u), clamped: Adam's first step is lr * sign(g) but for eps."""
    grid, packed = grid_of(module.lowbit["weight"].scheme.bits), module.lowbit["weight"]
    grad = grad_of(module)
    direction = grad / (grad.abs() + 1e-8)
    scale = expand_groups(module.weight_scale.detach().float(), packed.in_features, packed.scheme.block)
    codes = module.codes().float()
    d = -lr * direction / scale - lr * decay * codes
    key = key_of(seed, step, name)
    u = uniform(words(row_words(key, 0, len(codes)), column_words(key, codes.shape[1])))
    levels = torch.sign(d) * torch.ceil(d.abs() - u)
    return (codes + levels).clamp(grid.qmin, grid.qmax).to(torch.int8)


@pytest.mark.parametrize("decay", [0.0, 0.5], ids=["no-decay", "decay"])
@pytest.mark.parametrize(("bits", "group_size"), GRIDS)
def test_first_adam_step_is_the_definition(bits, group_size, decay):
    module = layer(bits, group_size)
    expected = expected_codes(module, "w", 1e-3, decay, 7, 3)
    before = module.codes().clone()
    leaf = CodesLeaf("w", module.weight)
    rule = make_rule("adamw", {})
    states = States(rule, leaf.rows, leaf.columns, 32, "cpu")
    moved = step_leaf(leaf, grad_of(module), rule, states, 1e-3, decay, seed=7, step=3)
    # the last bit of a quotient decides once in a while
    assert (module.codes() != expected).float().mean() < 1e-3
    assert moved.changed == int((module.codes() != before).sum()) > 0
    assert moved.levels >= moved.changed


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("bits", STATE_BITS)
def test_chunks_do_not_matter(name, bits, monkeypatch):
    results = []
    for chunk in (50, 1 << 15):
        monkeypatch.setattr(step_module, "CHUNK", chunk)
        module = layer(8, None, shape=(60, 100))
        leaf, rule = CodesLeaf("w", module.weight), make_rule(name, {})
        states = States(rule, leaf.rows, leaf.columns, bits, "cpu")
        with use_kernel("reference"):
            for step in range(4):
                step_leaf(leaf, grad_of(module, step), rule, states, 1e-3, 0.0, 0, step)
        results.append((module.codes().clone(), states.tensors))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(v, results[1][1][k]) for k, v in results[0][1].items() if k != "t")


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("bits", STATE_BITS)
def test_rows_without_gradient_stay(name, bits):
    module = layer("ternary", None, shape=(60, 100))
    grad = torch.zeros(60, 100)
    grad[::2] = grad_of(module)[::2]
    before = module.codes().clone()
    leaf, rule = CodesLeaf("w", module.weight), make_rule(name, {})
    states = States(rule, leaf.rows, leaf.columns, bits, "cpu")
    for step in range(20):
        step_leaf(leaf, grad, rule, states, 3e-2, 0.0, 0, step)
    assert torch.equal(module.codes()[1::2], before[1::2])
    assert not torch.equal(module.codes()[::2], before[::2])


@pytest.mark.parametrize("bits", [8, "ternary"])
def test_mean_over_seeds_is_the_float_step(bits):
    """Many seeds from one start: the mean of the codes goes where torch would put the float weight."""
    module = layer(bits, None)
    start, grad, seeds = module.stored().clone(), grad_of(module), 1000
    scale, codes = module.weight_scale.detach(), module.codes().float()
    total = torch.zeros_like(codes, dtype=torch.float64)
    leaf, rule = CodesLeaf("w", module.weight), make_rule("adamw", {})
    for seed in range(seeds):
        module.stored().copy_(start)
        step_leaf(leaf, grad, rule, States(rule, leaf.rows, leaf.columns, 32, "cpu"), 2e-4, 0.0, seed, 1)
        total += module.codes()
    grid = grid_of(bits)
    d = -2e-4 * torch.sign(grad) / scale
    inside = (codes + d >= grid.qmin) & (codes + d <= grid.qmax) & (codes > grid.qmin) & (codes < grid.qmax)
    error = (total / seeds - (codes + d))[inside]
    # variance of one rounding is at most 1/4; 1500 codes are looked at
    assert error.abs().max() < 5.3 * 0.5 / seeds**0.5
    assert abs(float(error.mean())) < 5.3 * 0.5 / (seeds * int(inside.sum())) ** 0.5


def test_conv1d_moves_in_storage_orientation():
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    module = lb.quantize(torch.nn.Sequential(Conv1D(6, 10)), lb.DQTConfig(bits=8))[0]
    leaf, rule = CodesLeaf("w", module.weight), make_rule("sgd", {"momentum": 0.0})
    grad = torch.zeros(10, 6)
    grad[2, 5] = 1.0
    module.weight.grad = grad
    before = lb.codes(module)[0].clone()
    step_leaf(leaf, leaf.gradient(), rule, States(rule, 6, 10, 32, "cpu"), 3e-3, 0.0, 0, 1)
    assert (lb.codes(module)[0] != before).nonzero().tolist() == [[2, 5]]


def test_learned_scales_move_by_factors_and_stay_positive():
    module = layer(8, None, scale="learned")
    before = module.weight_scale.detach().clone()
    leaf, rule = make_leaf("s", module.weight_scale), make_rule("adamw", {})
    assert isinstance(leaf, ScaleLeaf)
    step_leaf(leaf, torch.ones_like(before), rule, States(rule, leaf.rows, 1, 32, "cpu"), 0.01, 0.0, 0, 1)
    assert torch.allclose(module.weight_scale.detach() / before, torch.tensor(0.99005), rtol=1e-5)
    for step in range(2, 200):
        step_leaf(leaf, torch.ones_like(before), rule, States(rule, leaf.rows, 1, 32, "cpu"), 0.5, 0.0, 0, step)
    assert (module.weight_scale > 0).all()


def test_float_parameters_follow_torch():
    parameter = torch.nn.Parameter(torch.randn(7, 9))
    other = torch.nn.Parameter(parameter.detach().clone())
    optimizer = torch.optim.AdamW([other], lr=0.01, weight_decay=0.1)
    leaf, rule = FloatLeaf("w", parameter), make_rule("adamw", {})
    states = States(rule, 7, 9, 32, "cpu")
    for step in range(5):
        other.grad = torch.randn(7, 9)
        step_leaf(leaf, other.grad, rule, states, 0.01, 0.1, 0, step)
        optimizer.step()
    assert torch.allclose(parameter, other, atol=1e-6)


def test_bfloat16_parameters_do_not_stall():
    parameter = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    leaf, rule = FloatLeaf("w", parameter), make_rule("sgd", {"momentum": 0.0})
    for step in range(100):
        # a tenth of the distance to the next bfloat16
        step_leaf(leaf, torch.full((64, 64), -1.0), rule, States(rule, 64, 64, 32, "cpu"), 2**-7 / 10, 0.0, 0, step)
    assert float(parameter.detach().float().mean()) == pytest.approx(1 + 100 * 2**-7 / 10, abs=2e-3)


def test_convolutions_in_another_memory_format():
    parameter = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    before = parameter.detach().clone()
    leaf, rule = FloatLeaf("w", parameter), make_rule("sgd", {"momentum": 0.0})
    parameter.grad = torch.randn(4, 3, 2, 2)
    step_leaf(leaf, leaf.gradient(), rule, States(rule, leaf.rows, leaf.columns, 32, "cpu"), 0.1, 0.0, 0, 1)
    assert torch.allclose(parameter.detach(), before - 0.1 * parameter.grad)
