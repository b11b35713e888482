"""LARS and LAMB as torch optimizers: the functions of functional/trust.py, over lists of tensors, in real loops."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, get_polynomial_decay_schedule_with_warmup

import hf_lowbit as lb
from hf_lowbit.functional.trust import lamb, lars
from hf_lowbit.training.schedule import resnet_rate, warmup_polynomial
from tests.quantizers.architectures import BY_ID
from tests.training.runs import Sentences, arguments


# float32 in another order of operations
TOLERANCE = 1e-6
KINDS = {"lars": (lb.LARS, {"lr": 2.0}), "lamb": (lb.LAMB, {"lr": 0.05})}
both = pytest.mark.parametrize("kind", sorted(KINDS))


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Conv1d(1, 3, 2), nn.Flatten(), nn.Linear(12, 2)).to(
        dtype
    )


def run(module, optimizer, steps=12, schedule=None, start=0):
    """Steps with gradients that are a function of the step."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
        if schedule:
            schedule.step()


def expected(kind, module, steps, decay, rates):
    """What the functions give, tensor by tensor."""
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    moments = [[torch.zeros_like(w), torch.zeros_like(w)] for w in weights]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for index, w in enumerate(weights):
            grad = torch.randn(w.shape, generator=generator)
            m, v, layer = *moments[index], w if w.ndim > 1 else None
            if kind == "lars":
                moved, m = lars(grad, layer, m, rates[step], 0.9, 0.001, 0.0, decay)
            else:
                moved, m, v = lamb(grad, layer, m, v, step + 1, rates[step], (0.9, 0.999), 1e-6, decay)
            weights[index], moments[index] = w - moved, [m, v]
    return weights


@both
@pytest.mark.parametrize("decay", [0.0, 0.01], ids=["no-decay", "decay"])
def test_steps_under_warmup_and_polynomial_decay(kind, decay):
    module = network()
    make, options = KINDS[kind]
    optimizer = make(module.parameters(), weight_decay=decay, **options)
    schedule = get_polynomial_decay_schedule_with_warmup(optimizer, 4, 12, power=2, lr_end=1e-4)
    rates = [schedule.lr_lambdas[0](step) * options["lr"] for step in range(12)]
    wanted = expected(kind, module, 12, decay, rates)
    run(module, optimizer, 12, schedule)
    for found, right in zip(module.parameters(), wanted, strict=True):
        assert (found - right).abs().max() < TOLERANCE * max(1, float(right.abs().max()))


def test_lars_with_the_rate_outside_is_sgd_where_nothing_is_adapted():
    one, other = network(), network()
    groups = [{"params": list(one.parameters()), "adapt": False}]
    run(one, lb.LARS(groups, lr=0.1, lr_in_momentum=False, weight_decay=0.3))
    run(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    for found, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(found, right, atol=1e-5)


def test_lars_at_a_constant_rate_is_that_of_pytorch_optimizer():
    peers = pytest.importorskip("pytorch_optimizer")
    one, other = network(), network()
    run(one, lb.LARS(one.parameters(), lr=2.0, weight_decay=0.01))
    # below 4.1 its momentum began with the gradient without its ratio
    run(other, peers.LARS(other.parameters(), lr=2.0, momentum=0.9, weight_decay=0.01, trust_coefficient=0.001))
    for found, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(found, right, atol=1e-5)


@both
def test_biases_and_norms_are_neither_adapted_nor_decayed(kind):
    module = network()
    make, options = KINDS[kind]
    plain = [p.detach().clone() for p in module.parameters() if p.ndim <= 1]
    optimizer = make(module, weight_decay=0.5, **options)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip([p for p in module.parameters() if p.ndim <= 1], plain, strict=True))


@both
def test_skip_by_name(kind):
    make, options = KINDS[kind]
    module = network()
    optimizer = make(module, skip=["4", "re:[0]\\.weight"], **options)
    adapted = dict(zip(optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["adapted"], strict=True))
    assert [name for name, is_ in adapted.items() if is_] == ["2.weight"]
    with pytest.raises(ValueError, match="`skip` has 'head'"):
        make(network(), skip="head", **options)
    with pytest.raises(ValueError, match="named_parameters"):
        make(network().parameters(), skip="4", **options)


@both
def test_resume_is_exact(kind):
    make, options = KINDS[kind]
    whole, half = network(), network()
    run(whole, make(whole.parameters(), weight_decay=0.01, **options))
    first = make(half.parameters(), weight_decay=0.01, **options)
    run(half, first, 5)
    second = make(half.parameters(), lr=77.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(half, second, 7, start=5)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), half.parameters(), strict=True))


@both
def test_pickle_deepcopy_and_new_groups(kind):
    make, options = KINDS[kind]
    module = network()
    optimizer = make(module.parameters(), **options)
    run(module, optimizer, 2)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        copied.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "lr": 0.5})
        assert copied.param_groups[-1]["adapted"] == [True]
    with pytest.raises(ValueError, match="is not one of"):
        optimizer.load_state_dict(torch.optim.SGD(network().parameters(), lr=1).state_dict())


@both
def test_closure_and_parameters_without_gradients(kind):
    make, options = KINDS[kind]
    module = nn.Linear(3, 3)
    module.bias.requires_grad_(False)
    optimizer = make(list(module.parameters()), **options)

    def closure():
        optimizer.zero_grad()
        loss = module(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    before = module.weight.detach().clone()
    assert optimizer.step(closure) > 0
    assert not torch.equal(module.weight, before)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(kind, dtype):
    make, options = KINDS[kind]
    module, reference = network(dtype), network(dtype).double()
    run(module, make(module.parameters(), **options), 3)
    run(reference, make(reference.parameters(), **options), 3)
    # bfloat16 has eight bits
    tolerance = 1e-12 if dtype == torch.float64 else 0.02
    for parameter, other in zip(module.parameters(), reference.parameters(), strict=True):
        found, right = parameter.detach(), other.detach()
        assert found.dtype == dtype
        assert (found.double() - right).abs().max() <= 3 * tolerance * max(1, float(right.abs().max()))


@both
def test_zero_weights_and_zero_gradients_stay_numbers(kind):
    make, options = KINDS[kind]
    module = nn.Linear(3, 3)
    nn.init.zeros_(module.weight)
    optimizer = make(module.parameters(), weight_decay=0.1, **options)
    for value in (0.0, 1.0, 0.0):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.parametrize(
    ("make", "options", "match"),
    [
        pytest.param(lb.LARS, {"lr": -1.0}, "`lr`=-1.0", id="negative-rate"),
        pytest.param(lb.LARS, {"lr": float("nan")}, "`lr`=nan", id="nan-rate"),
        pytest.param(lb.LARS, {"lr": 1.0, "momentum": 1.0}, "`momentum`=1.0", id="momentum"),
        pytest.param(lb.LARS, {"lr": 1.0, "eta": -0.1}, "`eta`=-0.1", id="eta"),
        pytest.param(lb.LAMB, {"lr": 1.0, "weight_decay": -0.1}, "`weight_decay`", id="decay"),
        pytest.param(lb.LAMB, {"lr": 1.0, "betas": (0.9, 1.0)}, "`betas`", id="betas"),
        pytest.param(lb.LAMB, {"lr": 1.0, "eps": float("inf")}, "`eps`=inf", id="eps"),
    ],
)
def test_options_out_of_range(make, options, match):
    with pytest.raises(ValueError, match=match):
        make(network().parameters(), **options)


@both
def test_a_rate_is_required_since_the_trainer_passes_none(kind):
    with pytest.raises(TypeError, match="lr"):
        KINDS[kind][0](network().parameters())


@both
def test_sparse_and_complex(kind):
    make, options = KINDS[kind]
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = make(table.parameters(), **options)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    with pytest.raises(ValueError, match="complex"):
        make([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))], **options)


@both
def test_low_bit_weights_are_not_moved_behind_the_codes(kind):
    """Direct updates are the way to train them; a stock step would round them to the grid again."""
    make, options = KINDS[kind]
    model = lb.quantize(BY_ID["llama"].build(), lb.DQTConfig(bits=8))
    optimizer = make(model.parameters(), **options)
    ids = Sentences().ids[:2]
    model(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(RuntimeError, match="DQT"):
        optimizer.step()


class Pictures(torch.utils.data.Dataset):
    """Two classes that a channel's mean tells apart."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        picture = torch.randn(3, 16, 16, generator=generator)
        picture[index % 2] += 2
        return {"pixel_values": picture, "labels": index % 2}


@both
def test_trainer_with_warmup_decay_and_label_smoothing_on_a_resnet(kind, tmp_path):
    """Public reports: huggingface/transformers#33712 and #1302."""
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=2, layer_type="basic")
    model = ResNetForImageClassification(config)
    rate = {"lars": 3.0, "lamb": 0.02}[kind]
    args = arguments(tmp_path, **warmup_polynomial(rate, 16, 2), per_device_train_batch_size=16, weight_decay=5e-5,
                     label_smoothing_factor=0.1)  # fmt: skip
    made = KINDS[kind][0], {"lr": args.learning_rate}
    trainer = Trainer(model=model, args=args, train_dataset=Pictures(), optimizer_cls_and_kwargs=made)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    # all biases and norms, and nothing else, are at the plain rate
    groups = trainer.optimizer.optimizer.param_groups
    plain = [p for g in groups for p, is_ in zip(g["params"], g["adapted"], strict=True) if not is_]
    assert plain and all(p.ndim <= 1 for p in plain)
    # smoothing reaches the loss: with it a certain, right answer still costs something
    assert trainer.label_smoother is not None and trainer.label_smoother.epsilon == 0.1


def test_schedule():
    assert warmup_polynomial(10.0, 100, 5)["lr_scheduler_kwargs"] == {"power": 2.0, "lr_end": 1e-4}
    assert [resnet_rate(batch) for batch in (256, 16_384, 81_920)] == [(10.0, 5), (25.0, 5), (31.2, 25)]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"warmup_steps": 10}, "`warmup_steps`=10"),
        ({"warmup_steps": -1}, "`warmup_steps`=-1"),
        ({"warmup_steps": 1, "end": 2.0}, "`end`=2.0"),
        ({"warmup_steps": 1, "power": 0}, "`power`=0"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_schedule_out_of_range(fields, match):
    with pytest.raises(ValueError, match=match):
        warmup_polynomial(1.0, 10, **fields)
