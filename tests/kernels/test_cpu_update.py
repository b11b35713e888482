"""Updates by the C library: the bits of torch's operations, on every tier, for any scheme and number of threads."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_lowbit.configs.scheme import Scheme
from hf_lowbit.functional.directions import root
from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.functional.update import choose_update, explain_update
from hf_lowbit.nn.packed import PackedWeight
from hf_lowbit.nn.slot import make_parameter
from hf_lowbit.training.leaves import CodesLeaf
from hf_lowbit.training.rules import make_rule
from hf_lowbit.training.states import STATE_BITS, States
from hf_lowbit.training.step import describe, step_leaf
from tests.kernels.weights import make_weight


RULES = {
    "adamw": {},
    "adamw-slow": {"betas": (0.95, 0.5), "eps": 1e-3},
    "lion": {},
    "sgd": {},
    "nesterov": {"momentum": 0.5, "nesterov": True},
}
STEPS = 3


def run(
    kernel, scheme, rule, state_bits, shape, dtype=torch.float32, decay=0.0, transposed=False, seed=0, lr=1e-3,
    device="cpu",
):  # fmt: skip
    """Bytes, states and counts after a few steps with gradients of many sizes, some of them 0."""
    bits, group, asymmetric = scheme
    rows, columns = shape
    stored, scale, zero_point = make_weight(bits, group, asymmetric, rows, columns, seed)
    packed = PackedWeight(
        Scheme(bits, group, not asymmetric), (columns, rows) if transposed else (rows, columns), transposed
    )
    tensors = (None if tensor is None else tensor.to(device) for tensor in (stored[None].clone(), scale, zero_point))
    leaf = CodesLeaf("w", make_parameter(*tensors, packed, torch.float32))
    rule = make_rule({"nesterov": "sgd", "adamw-slow": "adamw"}.get(rule, rule), RULES[rule])
    states = States(rule, rows, columns, 32, device)
    states.bits = state_bits  # small weights keep 32 bits unless told
    states.tensors = states._empty(rows, columns, device)
    generator, counts = torch.Generator().manual_seed(seed), []
    with use_kernel(kernel):
        for step in range(1, STEPS + 1):
            size = 10.0 ** torch.randint(-12, 3, (rows, columns), generator=generator)
            grad = torch.randn(rows, columns, generator=generator) * size
            grad[torch.rand(rows, columns, generator=generator) < 0.2] = 0.0
            grad = grad.to(dtype).clamp(-6e4, 6e4).to(device)
            if transposed:
                grad = grad.t().contiguous().t()
            counts.append(step_leaf(leaf, grad, rule, states, lr, decay, seed, step))
    found = {name: tensor if name == "t" else tensor.cpu() for name, tensor in states.tensors.items()}
    return leaf.parameter.stored.cpu(), found, counts


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        same = found[1][name] == tensor
        assert same if name == "t" else bool(same.all()), name
    assert found[2] == expected[2]


SCHEMES = st.one_of(
    st.tuples(st.just("ternary"), st.sampled_from([None, "tensor", 3, 32]), st.just(False)),
    st.tuples(st.sampled_from([2, 3, 4, 8]), st.sampled_from([None, "tensor", 1, 5, 32, 64]), st.booleans()),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    scheme=SCHEMES,
    rule=st.sampled_from(sorted(RULES)),
    state_bits=st.sampled_from(STATE_BITS),
    shape=st.tuples(st.integers(1, 9), st.one_of(st.integers(1, 70), st.integers(120, 300), st.just(1025))),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    decay=st.sampled_from([0.0, 0.1]),
    transposed=st.booleans(),
    seed=st.integers(0, 9),
    lr=st.sampled_from([1e-5, 1e-3, 1e-1, 1e9]),
)
def test_bits_of_the_definition(tier, scheme, rule, state_bits, shape, dtype, decay, transposed, seed, lr):
    arguments = scheme, rule, state_bits, shape, dtype, decay, transposed, seed, lr
    assert_same(run(tier, *arguments), run("reference", *arguments))


@pytest.mark.parametrize("state_bits", STATE_BITS)
@pytest.mark.parametrize("bits", ["ternary", 2, 3, 4, 8])
def test_bits_do_not_depend_on_threads(tier, bits, state_bits):
    results, before = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(tier, (bits, None, False), "adamw", state_bits, (67, 515)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_same(other, results[0])


def test_roots_are_correctly_rounded():
    """All mantissas, at both parities of the exponent, within half a unit in the last place."""
    x = torch.arange(0x3F800000, 0x40800000, 7, dtype=torch.int32).view(torch.float32)
    assert (root(x).double() - x.double().sqrt()).abs().max() <= 2.0**-24


def leaf_and_states(rule, columns=40):
    stored, scale, _ = make_weight(8, None, False, 20, columns)
    packed = PackedWeight(Scheme(8, None), (20, columns))
    leaf = CodesLeaf("w", make_parameter(stored.unsqueeze(0), scale, None, packed, torch.float32))
    return leaf, States(rule, 20, columns, 32, "cpu")


def test_why_torch_is_used_is_said():
    rule = make_rule("adafactor", {})
    update = describe(leaf_and_states(rule)[0], torch.float32, rule, leaf_and_states(rule)[1])
    assert choose_update(update) is None
    reasons = dict(explain_update(update))
    assert "whole matrix" in reasons["cpu-avx2"] and reasons["torch"] == ""
    rule = make_rule("adamw", {})
    leaf, states = leaf_and_states(rule)
    assert "float64" in dict(explain_update(describe(leaf, torch.float64, rule, states)))["cpu-portable"]


def test_a_kernel_is_chosen_where_the_library_is(tier):
    rule = make_rule("adamw", {})
    leaf, states = leaf_and_states(rule)
    update = describe(leaf, torch.bfloat16, rule, states)
    assert choose_update(update) is not None
    assert explain_update(update)[-1] == (choose_update(update).name, "")
