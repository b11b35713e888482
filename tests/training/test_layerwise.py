"""LARS and LAMB as rules of direct updates: the step of a low-bit weight, its flip rate, resume, and the Trainer."""

import pytest
import torch
from transformers import Trainer

import hf_lowbit as lb
from hf_lowbit.functional.grid import grid_of
from hf_lowbit.functional.trust import lamb, lars
from hf_lowbit.training.leaves import FloatLeaf
from hf_lowbit.training.rules import make_rule
from hf_lowbit.training.states import States
from hf_lowbit.training.step import step_leaf
from hf_lowbit.training.updater import direct_parameters
from tests.training.runs import MODES, Sentences, arguments, different, model, snapshot


# rates at which a tiny model learns within some steps
RATES = {"lars": 2.0, "lamb": 0.01}
both = pytest.mark.parametrize("rule", sorted(RATES))


def backward(module, count=4, start=0):
    ids = Sentences().ids[start : start + count]
    module(input_ids=ids, labels=ids).loss.backward()


@both
@pytest.mark.parametrize("decay", [0.0, 0.1], ids=["no-decay", "decay"])
def test_float_leaves_move_as_the_torch_optimizers_do(rule, decay):
    """One rule for low-bit and float parameters: on floats there is no rounding, so the two must agree."""
    torch.manual_seed(0)
    matrix, vector = torch.nn.Parameter(torch.randn(6, 5)), torch.nn.Parameter(torch.randn(5))
    twins = [torch.nn.Parameter(p.detach().clone()) for p in (matrix, vector)]
    optimizer = {"lars": lb.LARS, "lamb": lb.LAMB}[rule](twins, lr=RATES[rule], weight_decay=decay)
    made = make_rule(rule, {})
    leaves = [FloatLeaf("matrix", matrix), FloatLeaf("vector", vector)]
    states = [States(made, leaf.rows, leaf.columns, 32, "cpu") for leaf in leaves]
    for step in range(6):
        for leaf, state, twin in zip(leaves, states, twins, strict=True):
            leaf.parameter.grad = torch.randn(leaf.parameter.shape)
            twin.grad = leaf.parameter.grad.clone()
            step_leaf(leaf, leaf.gradient(), made, state, RATES[rule], decay if leaf.adapted else 0.0, 0, step)
        optimizer.step()
    for twin, leaf in zip(twins, leaves, strict=True):
        assert torch.allclose(twin, leaf.parameter, atol=1e-5)


@both
def test_a_low_bit_weight_moves_by_the_step_on_average(rule):
    """The mean over many seeds of the rounded step is the exact step of the dense weight."""
    made = model(bits=8)
    backward(made)
    name, weight = direct_parameters(made)[0]
    before, grad = weight.dense().float(), weight.grad.float()
    zero = torch.zeros_like(grad)
    if rule == "lars":
        wanted = lars(grad, before, zero, 5.0, 0.9, 0.001, 0.0, 0.01)[0]
    else:
        wanted = lamb(grad, before, zero, zero, 1, 5e-4, (0.9, 0.999), 1e-6, 0.01)[0]
    total, seeds, kept = torch.zeros_like(before), 64, weight.stored.clone()
    for seed in range(seeds):
        optimizer = lb.DQTOptimizer([(name, weight)], lr=5.0 if rule == "lars" else 5e-4, optimizer=rule, seed=seed,
                                    weight_decay=0.01)  # fmt: skip
        optimizer.step()
        total += weight.dense().float() - before
        weight.stored.copy_(kept)
    level = float(weight.scale.max())
    # standard error of the mean of 64 roundings, whose variance is at most a quarter of a level squared
    inside = before.abs() < 120 * weight.scale
    error = ((total / seeds + wanted)[inside]).abs()
    assert error.mean() < 0.5 * level / seeds**0.5
    assert abs(float((total / seeds + wanted)[inside].mean())) < 3 * 0.5 * level / (seeds * int(inside.sum())) ** 0.5


def test_lars_makes_layers_change_the_same_share_of_their_codes():
    """Layers whose gradients differ a thousandfold: under LARS their flip rates do not, under SGD they do."""

    def rates(rule, lr):
        made = model(bits="ternary")
        backward(made)
        ends = ("up_proj.weight", "q_proj.weight")
        chosen = [(name, p) for name, p in direct_parameters(made) if name.endswith(ends)]
        shares = []
        for index, (name, weight) in enumerate(chosen):
            weight.grad = weight.grad * 1000.0**index / weight.grad.norm()
            optimizer = lb.DQTOptimizer([(name, weight)], lr=lr, optimizer=rule)
            optimizer.step()
            moved = optimizer.last_step.moved[name]
            # no more codes can change than the levels that the step asked for
            assert moved.changed <= moved.levels
            shares.append(moved.changed / weight.numel())
        return shares

    shares = rates("lars", 100.0)
    assert min(shares) > 0 and max(shares) < 4 * min(shares)
    shares = rates("sgd", 0.05)
    assert max(shares) > 20 * min(shares)


@pytest.mark.parametrize("mode", ["8", "ternary"])
def test_the_flip_rate_is_what_the_step_predicts(mode):
    """A code moves with probability |step| / scale where that is below 1: a bound of the share that does."""
    made = model(**MODES[mode])
    backward(made)
    for name, weight in direct_parameters(made):
        before = weight.dense().float()
        step = lars(weight.grad.float(), before, torch.zeros_like(before), 20.0, 0.9, 0.001, 0.0, 0.0)[0]
        predicted = float((step / weight.scale).abs().clamp(max=1).mean())
        optimizer = lb.DQTOptimizer([(name, weight)], lr=20.0, optimizer="lars")
        optimizer.step()
        measured = optimizer.last_step.moved[name].changed / weight.numel()
        # three standard deviations of a share; the clamp at the ends of the grid keeps some codes where they are
        spread = 3 * (predicted / weight.numel()) ** 0.5
        assert predicted / 3 - spread <= measured <= predicted + spread, name


@both
@pytest.mark.parametrize("mode", ["8-ternary-forward", "8-learned-scale", "4-groups", "ternary"])
def test_trainer_learns_and_codes_stay_on_the_grid(rule, mode, tmp_path):
    made = model(**MODES[mode])
    moved = {name for name, _ in direct_parameters(made)}
    for name, parameter in made.named_parameters():
        # what is learned is learned by the codes
        parameter.requires_grad_(name in moved)
    args = arguments(tmp_path, max_steps=25, learning_rate=RATES[rule], logging_steps=5, warmup_steps=3)
    callback = lb.DQTCallback(rule, state_bits=8)
    optimizer = {"lars": lb.LARS, "lamb": lb.LAMB}[rule]
    data = Sentences(count=8)
    trainer = Trainer(model=made, args=args, train_dataset=data, callbacks=[callback],
                      optimizer_cls_and_kwargs=(optimizer, {"lr": args.learning_rate}))  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] and callback.changed_codes > 0
    for module in made.modules():
        if getattr(module, "lowbit", False):
            grid = grid_of(MODES[mode]["bits"])
            codes = lb.codes(module)[0]
            assert grid.qmin <= codes.min() and codes.max() <= grid.qmax


@both
def test_resume_is_bit_exact(rule, tmp_path):
    def train(folder, resume=None, **fields):
        made = model(**MODES["8-ternary-forward"])
        args = arguments(folder, max_steps=6, learning_rate=RATES[rule], save_strategy="steps", save_steps=3, **fields)
        optimizer = {"lars": lb.LARS, "lamb": lb.LAMB}[rule], {"lr": args.learning_rate}
        trainer = Trainer(model=made, args=args, train_dataset=Sentences(), optimizer_cls_and_kwargs=optimizer,
                          callbacks=[lb.DQTCallback(rule, state_bits=8)])  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return snapshot(trainer.model)

    whole = train(tmp_path / "whole")
    resumed = train(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-3"))
    assert different(whole, resumed) == []


@pytest.mark.parametrize(
    ("rule", "options", "match"),
    [
        ("lars", {"momentum": 1.0}, "`momentum`=1.0"),
        ("lars", {"eta": 0.0}, "`eta`=0.0"),
        ("lars", {"betas": (0.9, 0.9)}, "no option `betas`"),
        ("lamb", {"eps": -1.0}, "`eps`=-1.0"),
        ("lamb", {"betas": (0.9,)}, "`betas`"),
    ],
)
def test_wrong_options_are_named(rule, options, match):
    with pytest.raises((TypeError, ValueError), match=match):
        lb.DQTCallback(rule, **options)
