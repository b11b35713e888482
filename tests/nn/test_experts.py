"""Fused experts: the dense module with the numbers of the codes, in every layout and by every implementation."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn

import hf_lowbit as lb
from hf_lowbit.nn.classes import dense_class
from hf_lowbit.nn.experts import ExpertStack, LowBitExperts, _reading
from hf_lowbit.nn.swap import restore_dense
from tests.nn.models import by_reference, random
from tests.quantizers.architectures import BY_ID, MIXTURE


# a few dozen products in another order, accumulated in float32
LAST_BITS = 1e-5
LLAMA4 = {**MIXTURE, "num_local_experts": 4, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 1,
          "num_experts_per_tok": 1}  # fmt: skip


def build(row_id):
    """A dense model of one layer."""
    model, fields = (
        (hf.Llama4ForCausalLM, LLAMA4) if row_id == "llama4" else (BY_ID[row_id].model, BY_ID[row_id].fields)
    )
    torch.manual_seed(0)
    model = model(model.config_class(**{**fields, "num_hidden_layers": 1})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 3:
                parameter.normal_(std=0.1)
            elif parameter.ndim == 2 and parameter.shape[0] == 4:
                # biases of the experts, and the router
                parameter.normal_()
    return model


IDS = torch.tensor([[1, 5, 9, 33, 7, 21, 60]])
FAMILIES = ["mixtral", "qwen3-moe", "gpt-oss", "llama4"]
FIELDS = [
    pytest.param({"bits": 4, "group_size": 24}, id="4-bits-short-group"),
    pytest.param({"bits": 3, "group_size": 32}, id="3-bits-zero-points"),
    pytest.param({"bits": 8, "group_size": "tensor"}, id="8-bits-tensor"),
    pytest.param({"bits": "ternary", "group_size": None, "activations": "float"}, id="ternary-channel"),
]


def experts_only(model, **fields):
    """Only the experts low-bit, so that nothing else moves the output."""
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear and name != "lm_head"]
    skipped = [name for name in linear if "router" not in name]
    return lb.quantize(model, lb.LowBitConfig(modules_to_not_convert=skipped, **fields))


def dense_twin(model):
    """The same model, dense, with the numbers of the codes."""
    twin = copy.deepcopy(model)
    restore_dense(twin.modules(), torch.float32)
    return twin


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("row_id", FAMILIES)
def test_a_model_is_its_dense_twin(row_id, fields):
    model = experts_only(build(row_id), **fields)
    experts = [module for module in model.modules() if isinstance(module, LowBitExperts)]
    assert len(experts) == 1 and all(set(m.lowbit) == {"gate_up_proj", "down_proj"} for m in experts)
    twin = dense_twin(model)
    assert not any(isinstance(module, LowBitExperts) for module in twin.modules())
    difference = by_reference(model, IDS).logits - by_reference(twin, IDS).logits
    assert float(difference.abs().max()) <= LAST_BITS


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("row_id", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_any_experts_implementation(row_id, implementation):
    model = experts_only(build(row_id), bits=4, group_size=32)
    twin = dense_twin(model)
    model.config._experts_implementation = implementation
    for module in model.modules():
        if isinstance(module, LowBitExperts):
            module.config._experts_implementation = implementation
    difference = by_reference(model, IDS).logits - by_reference(twin, IDS).logits
    assert float(difference.abs().max()) <= LAST_BITS


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("row_id", ["mixtral", "gpt-oss"])
def test_the_models_own_forward_sees_dense_stacks(row_id, implementation):
    """Called by keyword, as a future model might, an experts module runs its own forward on the stacks."""
    model = experts_only(build(row_id), bits=4, group_size=32)
    twin = dense_twin(model)
    low = next(module for module in model.modules() if isinstance(module, LowBitExperts))
    dense = next(m for m in twin.modules() if type(m) is dense_class(low))
    low.config._experts_implementation = implementation
    x, index = random(5, 64), torch.tensor([[0, 1], [2, 0], [3, 1], [1, 2], [2, 3]])
    second, third = ("router_indices", "routing_weights") if row_id == "gpt-oss" else ("top_k_index", "top_k_weights")
    routing = {second: index, third: torch.softmax(random(5, 2), dim=-1)}
    if implementation != "eager":
        routing = {"top_k_index": index, "top_k_weights": routing[third]}
    with torch.no_grad():
        expected = dense(x, index, routing.get(third, routing.get("top_k_weights")))
        assert torch.allclose(low(x, **routing), expected, atol=LAST_BITS)
        assert torch.allclose(by_reference(low, x, index, next(reversed(routing.values()))), expected, atol=LAST_BITS)


def test_orientation():
    """GPT-OSS and Llama 4 store [E, K, N]; packed rows always run along the input."""
    for row_id, transposed in zip(FAMILIES, (False, False, True, True), strict=True):
        model = experts_only(build(row_id), bits=4, group_size=32)
        module = next(m for m in model.modules() if isinstance(m, LowBitExperts))
        packed = module.lowbit["gate_up_proj"]
        assert packed.transposed is transposed, row_id
        assert (packed.in_features, packed.experts) == (64, (4,)), row_id
        assert module.lowbit["down_proj"].out_features == 64, row_id
        assert module._parameters["gate_up_proj"].shape == (4, 1, packed.out_features, 32), row_id
        assert module._parameters["gate_up_proj_scale"].shape == (4, packed.out_features, 2), row_id


def test_biases_stay_bit_equal():
    dense = build("gpt-oss")
    model = experts_only(build("gpt-oss"), bits=4, group_size=32)
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        path = f"model.layers.0.mlp.experts.{name}"
        assert torch.equal(model.get_parameter(path), dense.get_parameter(path))


def test_gradients_pass_to_the_input():
    model = experts_only(build("mixtral"), bits=8, group_size=32)
    twin, gradients = dense_twin(model), []
    for m in (model, twin):
        x = random(1, 7, 64).requires_grad_()
        m(inputs_embeds=x).logits.square().sum().backward()
        gradients.append(x.grad)
    assert torch.allclose(*gradients, rtol=1e-3, atol=1e-4)


def test_int8_activations_reach_the_experts():
    floats = experts_only(build("mixtral"), bits=4, group_size=32)
    integers = experts_only(build("mixtral"), bits=4, group_size=32, activations="int8")
    difference = (by_reference(floats, IDS).logits - by_reference(integers, IDS).logits).norm()
    # 127 steps a token: some percent at most, and something
    assert 0 < float(difference / by_reference(floats, IDS).logits.norm()) < 0.05


def test_ids_that_are_no_experts_add_nothing():
    """Expert parallelism marks the pairs of other ranks by an id past the last expert."""
    model = experts_only(build("mixtral"), bits=4, group_size=32)
    module = next(m for m in model.modules() if isinstance(m, LowBitExperts))
    x, weights = random(3, 64), torch.tensor([[0.7, 0.0], [0.0, 0.2], [0.0, 0.0]])
    with torch.no_grad():
        marked = module(x, torch.tensor([[1, 4], [4, 2], [4, 4]]), weights)
        plain = module(x, torch.tensor([[1, 0], [0, 2], [0, 0]]), weights)
    assert torch.equal(marked, plain) and not marked[2].any()


def test_no_tokens():
    module = next(m for m in experts_only(build("mixtral"), bits=4).modules() if isinstance(m, LowBitExperts))
    with torch.no_grad():
        nothing = module(random(0, 64), torch.zeros(0, 2, dtype=torch.int64), random(0, 2))
    assert nothing.shape == (0, 64)


def test_compile_has_no_graph_break():
    torch.compiler.reset()
    module = next(m for m in experts_only(build("mixtral"), bits=4).modules() if isinstance(m, LowBitExperts))
    arguments = random(5, 64), torch.tensor([[0, 1], [2, 0], [3, 1], [1, 2], [2, 3]]), random(5, 2)
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")(*arguments)
        assert torch.equal(compiled, module(*arguments))
    torch.compiler.reset()


@pytest.fixture
def stack():
    """The stack of a transposed module with zero points, and the dense parameter."""
    model = experts_only(build("gpt-oss"), bits=3, group_size=32)
    module = next(m for m in model.modules() if isinstance(m, LowBitExperts))
    return ExpertStack(module, "gate_up_proj", torch.float32), module.dense_weight("gate_up_proj")


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(2, id="number"),
        pytest.param(-1, id="from-the-end"),
        pytest.param(torch.tensor(1), id="scalar-tensor"),
        pytest.param(torch.tensor([3, 0, 3]), id="tensor"),
        pytest.param([1, 2], id="list"),
        pytest.param(slice(1, 3), id="slice"),
        pytest.param(torch.tensor([True, False, True, False]), id="mask"),
        pytest.param((1, slice(None), slice(0, 5)), id="tuple"),
        pytest.param(..., id="ellipsis"),
    ],
)
def test_a_stack_is_indexed_as_the_parameter(stack, index):
    assert torch.equal(stack[0][index], stack[1][index])


def test_a_stack_is_used_as_the_parameter(stack):
    low, dense = stack
    x = random(4, 3, 64)
    assert (low.shape, low.dtype) == (dense.shape, dense.dtype)
    assert torch.equal(torch.bmm(x, low), torch.bmm(x, dense))
    assert torch.equal(torch.stack([low, low]), torch.stack([dense, dense]))
    assert torch.equal(low.transpose(1, 2), dense.transpose(1, 2))
    assert torch.equal(low.sum(), dense.sum()) and low.device == dense.device and low.ndim == 3
    with pytest.raises(AttributeError):
        low.no_such_thing  # noqa: B018


def test_outside_of_its_forward_a_name_is_the_packed_parameter():
    model = experts_only(build("llama4"), bits=4, group_size=32)
    module = next(m for m in model.modules() if isinstance(m, LowBitExperts))
    assert module.gate_up_proj is module._parameters["gate_up_proj"] and module.gate_up_proj.dtype == torch.int8
    with pytest.raises((RuntimeError, TypeError)):
        module(random(5, 7))
    assert _reading.get() is None
    assert module.gate_up_proj.dtype == torch.int8


@pytest.mark.parametrize("row_id", FAMILIES)
def test_the_dense_classes_and_names_return(row_id):
    dense, model = build(row_id), experts_only(build(row_id), bits=8, group_size=32)
    restore_dense(model.modules(), torch.float32)
    assert [type(m) for m in model.modules() if "Experts" in type(m).__name__] == [
        type(m) for m in dense.modules() if "Experts" in type(m).__name__
    ]
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in dense.named_parameters()}
