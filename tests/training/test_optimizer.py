"""`DQTOptimizer`: torch's semantics, its own state, resume, release of gradients."""

import copy
import io

import pytest
import torch
from torch import nn

import hf_lowbit as lb
from hf_lowbit.training.rules import RULES
from tests.training.runs import MODES, Sentences, different, model, snapshot


DATA = Sentences()


def batch(index):
    ids = DATA.ids[4 * (index % 4) : 4 * (index % 4) + 4]
    return {"input_ids": ids, "labels": ids}


def train(module, optimizer, steps=6, start=0, scheduler=None, clip=None):
    losses = []
    for index in range(start, start + steps):
        loss = module(**batch(index)).loss
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        if scheduler:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_learns(mode):
    module = model(**MODES[mode])
    losses = train(module, lb.DQTOptimizer(module, lr=5e-3), steps=20)
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


@pytest.mark.parametrize("state_bits", [32, 16, 8, 4])
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_every_rule_learns_at_every_state_width(rule, state_bits):
    module = model()
    rate = {"adamw": 3e-3, "lion": 1e-3, "sgd": 0.05, "adafactor": 3e-2}[rule]
    losses = train(module, lb.DQTOptimizer(module, lr=rate, optimizer=rule, state_bits=state_bits), steps=16)
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


@pytest.mark.parametrize("mode", ["8-learned-scale", "ternary"])
@pytest.mark.parametrize(("rule", "state_bits"), list(zip(sorted(RULES), [4, 8, 16, 32, 16, 8], strict=True)))
def test_resume_is_bit_exact(rule, state_bits, mode):
    def make():
        module = model(**MODES[mode])
        return module, lb.DQTOptimizer(module, lr=3e-3, optimizer=rule, state_bits=state_bits, seed=5)

    module, optimizer = make()
    losses = train(module, optimizer, steps=6)
    first, half = make()
    train(first, half, steps=3)
    buffer = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": half.state_dict()}, buffer)
    saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    second, other = make()
    second.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert train(second, other, steps=3, start=3) == losses[3:]
    assert different(snapshot(module), snapshot(second)) == []
    ours, theirs = optimizer.updater.state["weights"], other.updater.state["weights"]
    assert all(
        torch.equal(torch.as_tensor(v), torch.as_tensor(theirs[n][k])) for n in ours for k, v in ours[n].items()
    )


def test_states_keep_their_dtypes_through_a_state_dict():
    module = model()
    optimizer = lb.DQTOptimizer(module, state_bits=8)
    train(module, optimizer, steps=1)
    before = {n: {k: v.dtype for k, v in s.items() if k != "t"} for n, s in optimizer.updater.state["weights"].items()}
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    after = {n: {k: v.dtype for k, v in s.items() if k != "t"} for n, s in optimizer.updater.state["weights"].items()}
    assert before == after and torch.uint8 in set(before["model.layers.0.mlp.up_proj.weight"].values())


def test_updates_do_not_depend_on_threads():
    results = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        module = model()
        optimizer = lb.DQTOptimizer(module, lr=3e-3, state_bits=8)
        for step in range(3):
            for index, parameter in enumerate(module.parameters()):
                if parameter.requires_grad:
                    generator = torch.Generator().manual_seed(100 * step + index)
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        results.append(snapshot(module))
    torch.set_num_threads(1)
    assert different(*results) == []


def test_torch_generators_do_not_matter():
    results = []
    for seed in (0, 1):
        module = model()
        optimizer = lb.DQTOptimizer(module, lr=3e-3)
        torch.manual_seed(seed)
        train(module, optimizer, steps=3)
        results.append(snapshot(module))
    assert different(*results) == []


def test_seed_matters():
    results = []
    for seed in (0, 1):
        module = model()
        train(module, lb.DQTOptimizer(module, lr=3e-3, seed=seed), steps=1)
        results.append(snapshot(module))
    assert different(*results)


def test_groups_and_schedulers_set_the_rates():
    module = model()
    low, rest = [], []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (low if "mlp" in name else rest).append((name, parameter))
    optimizer = lb.DQTOptimizer([{"params": low, "lr": 0.0}, {"params": rest}], lr=3e-3)
    before = snapshot(module)
    train(module, optimizer, steps=2)
    changed = different(before, snapshot(module))
    assert changed and not any("mlp" in name for name in changed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = snapshot(module)
    train(module, optimizer, steps=2, scheduler=scheduler)
    assert different(before, snapshot(module)) == []


def test_parameters_without_names_work_too():
    module = model()
    before = snapshot(module)
    train(module, lb.DQTOptimizer(module.parameters(), lr=3e-3), steps=1)
    assert different(before, snapshot(module))


def test_clipping_and_accumulation():
    """Two halves accumulated are one batch, up to the order of sums; codes may differ where the last bit decides."""
    one, two = model(bits=8), model(bits=8)
    first, second = lb.DQTOptimizer(one, lr=1e-3), lb.DQTOptimizer(two, lr=1e-3)
    ids = DATA.ids[:4]
    one(input_ids=ids, labels=ids).loss.backward()
    for half in (ids[:2], ids[2:]):
        (two(input_ids=half, labels=half).loss / 2).backward()
    for module, optimizer in ((one, first), (two, second)):
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    codes = [torch.cat([m.codes().flatten() for m in x.modules() if hasattr(m, "training_form")]) for x in (one, two)]
    assert (codes[0] != codes[1]).float().mean() < 1e-3


def test_closure():
    module = model()
    optimizer = lb.DQTOptimizer(module, lr=3e-3)

    def closure():
        optimizer.zero_grad()
        loss = module(**batch(0)).loss
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure).item() < first.item()
    assert sum(moved.changed for moved in optimizer.last_step.moved.values()) > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_gradients_that_are_no_numbers_skip_the_step_for_all(value):
    module = model()
    optimizer = lb.DQTOptimizer(module, lr=3e-3, max_skips=3)
    train(module, optimizer, steps=1)
    before = snapshot(module)
    state = copy.deepcopy(optimizer.updater.state["weights"])
    for attempt in range(3):
        module(**batch(0)).loss.backward()
        module.model.layers[1].mlp.up_proj.weight.grad[3, 4] = value
        if attempt == 2:
            with pytest.raises(FloatingPointError, match="3 steps in a row"):
                optimizer.step()
        else:
            optimizer.step()
        assert optimizer.last_step.skipped
        optimizer.zero_grad()
    assert different(before, snapshot(module)) == []
    now = optimizer.updater.state["weights"]
    assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(now[n][k])) for n in state for k, v in state[n].items())


def test_a_good_step_resets_the_count_of_skips():
    module = model()
    optimizer = lb.DQTOptimizer(module, lr=1e-3, max_skips=2)
    for bad in (True, False, True, False):
        module(**batch(0)).loss.backward()
        if bad:
            module.model.norm.weight.grad.fill_(float("nan"))
        optimizer.step()
        assert optimizer.last_step.skipped == bad
        optimizer.zero_grad()


def test_released_gradients_give_the_same_codes():
    kept, released = model(), model()
    first = lb.DQTOptimizer(kept, lr=3e-3, state_bits=8)
    second = lb.DQTOptimizer(released, lr=3e-3, state_bits=8, release_gradients=True)
    losses = train(kept, first), train(released, second)
    assert losses[0] == losses[1]
    assert different(snapshot(kept), snapshot(released)) == []
    released(**batch(0)).loss.backward()
    assert all(m.weight.grad is None for m in released.modules() if hasattr(m, "training_form"))
    second.step()
    assert second.last_step.moved


def test_released_gradients_can_not_be_accumulated():
    module = model()
    lb.DQTOptimizer(module, release_gradients=True)
    module(**batch(0)).loss.backward()
    with pytest.raises(RuntimeError, match="accumulated"):
        module(**batch(1)).loss.backward()


def test_frozen_layers_stay_and_need_no_gradient():
    module = model()
    frozen = [m.weight.requires_grad_(False) for n, m in module.named_modules() if n.endswith("q_proj")]
    before = snapshot(module)
    train(module, lb.DQTOptimizer(module, lr=3e-3), steps=2)
    changed = different(before, snapshot(module))
    assert frozen and changed and not any("q_proj" in name for name in changed)


def test_shared_module_gets_the_sum_of_its_gradients():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            return self.inner(torch.tanh(self.inner(x)))

    module = lb.quantize(Twice(), lb.DQTConfig(bits=8))
    optimizer = lb.DQTOptimizer(module, lr=1e-2)
    before = module.inner.codes().clone()
    module(torch.randn(4, 16)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(module.inner.codes(), before)


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("bits", [8, "ternary", 3])
def test_layers_of_one_parameter(bits, size):
    module = lb.quantize(nn.Sequential(nn.Linear(*size)), lb.DQTConfig(bits=bits))
    optimizer = lb.DQTOptimizer(module, lr=0.1, state_bits=4)
    for _ in range(3):
        module(torch.randn(2, size[0])).sum().backward()
        optimizer.step()
        assert list(optimizer.last_step.moved) == ["0.weight"]
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        pytest.param(lambda m: lb.DQTOptimizer(m, optimizer="adam"), "`optimizer`='adam'", id="rule"),
        pytest.param(lambda m: lb.DQTOptimizer(m, state_bits=6), "`state_bits`=6", id="state-bits"),
        pytest.param(lambda m: lb.DQTOptimizer(m, lr=-1.0), "`lr`=-1.0", id="rate"),
        pytest.param(lambda m: lb.DQTOptimizer(m, momentum=0.9), "no option `momentum`", id="option"),
        pytest.param(lambda m: lb.DQTOptimizer(m, seed=1.5), "`seed`=1.5", id="seed"),
        pytest.param(lambda m: lb.DQTOptimizer(nn.Linear(2, 2)), "no trainable low-bit weight", id="float-model"),
    ],
)
def test_wrong_arguments_are_named(make, match):
    with pytest.raises((TypeError, ValueError), match=match):
        make(model())


def test_states_of_another_optimizer_or_width_are_refused():
    module = model()
    optimizer = lb.DQTOptimizer(module, state_bits=8)
    train(module, optimizer, steps=1)
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="`optimizer`='adamw'"):
        lb.DQTOptimizer(module, optimizer="lion", state_bits=8).load_state_dict(copy.deepcopy(saved))
    with pytest.raises(ValueError, match="its state `m` is"):
        lb.DQTOptimizer(module, state_bits=32).load_state_dict(copy.deepcopy(saved))
    with pytest.raises(ValueError, match="not one of DQTOptimizer"):
        other = {"state": {}, "param_groups": saved["param_groups"]}
        lb.DQTOptimizer(module, state_bits=8).load_state_dict(other)
