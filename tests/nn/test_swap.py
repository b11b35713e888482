"""Converting in place and back: all or nothing, ties, attributes, and the way transformers loads."""

import pytest
import torch
from torch import nn

import hf_lowbit as lb
from hf_lowbit.functional.grid import grid_of
from hf_lowbit.functional.packing import pack
from hf_lowbit.functional.rounding import round_to_nearest
from hf_lowbit.nn.linear import FlatLinear, LowBitLinear
from hf_lowbit.nn.packed import LowBitModule
from hf_lowbit.nn.swap import convert, flatten_head, prepare, restore_dense
from hf_lowbit.nn.targets import find_targets
from tests.nn.models import Layers, converted, random
from tests.quantizers.architectures import BY_ID


def snapshot(model):
    return [(name, type(m)) for name, m in model.named_modules()], {
        n: p.clone() for n, p in model.state_dict().items()
    }


def unchanged(model, before):
    classes, state = before
    now = model.state_dict()
    return [(n, type(m)) for n, m in model.named_modules()] == classes and all(
        now[n].dtype == p.dtype and torch.equal(now[n].nan_to_num(7), p.nan_to_num(7)) for n, p in state.items()
    )


@pytest.mark.parametrize("bits", ["ternary", 3, 8], ids=str)
def test_conversion_is_rounding_and_packing(bits):
    dense, low = Layers(), converted(Layers(), bits, 4)
    grid = grid_of(bits)
    for name, transposed in (("linear", False), ("conv1d", True), ("embedding", False)):
        weight = getattr(dense, name).weight.detach()
        q = round_to_nearest(
            weight.t() if transposed else weight, grid, 4, low.linear.lowbit["weight"].scheme.symmetric
        )
        module = getattr(low, name)
        assert torch.equal(module.weight, pack(q.codes, grid).unsqueeze(0))
        assert torch.equal(module.weight_scale, q.scale)
        assert (module.weight_zero_point is None) if q.zero_point is None else (
            torch.equal(module.weight_zero_point, q.zero_point)
        )  # fmt: skip


def test_the_module_is_the_same_object_with_its_hooks():
    model, calls = Layers(), []
    linear = model.linear
    linear.note = "kept"
    linear.register_forward_hook(lambda *_: calls.append(1))
    converted(model)
    assert model.linear is linear and linear.note == "kept" and type(linear) is LowBitLinear
    linear(random(1, 10))
    assert calls == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_holds_no_number_stops_before_any_change(bad):
    model = Layers()
    with torch.no_grad():
        model.embedding.weight[5, 3] = bad
        model.conv1d.weight[2, 2] = bad
    before = snapshot(model)
    with pytest.raises(ValueError, match="hold NaN or infinity: nothing was changed") as caught:
        converted(model)
    assert "`conv1d`, `embedding`" in str(caught.value) and "`linear`" not in str(caught.value)
    assert unchanged(model, before)


def test_a_float64_beyond_float32_stops_before_any_change():
    model = Layers().double()
    with torch.no_grad():
        model.embedding.weight[5, 3] = 1e300
    before = snapshot(model)
    with pytest.raises(ValueError, match="`embedding` hold NaN or infinity"):
        converted(model)
    assert unchanged(model, before)


def test_large_float16_weights_are_no_infinity():
    model = nn.Sequential(nn.Linear(64, 64)).half()
    with torch.no_grad():
        model[0].weight.fill_(60000)
    assert float(converted(model, 8, None)[0].dense_weight().max()) == pytest.approx(60000, rel=1e-3)


def test_bad_experts_are_named_by_parameter():
    model = BY_ID["mixtral"].build()
    name = "model.layers.1.mlp.experts.down_proj"
    with torch.no_grad():
        model.get_parameter(name)[3, 0, 0] = torch.nan
    before = snapshot(model)
    with pytest.raises(ValueError, match=f"`{name}`"):
        lb.quantize(model, lb.LowBitConfig())
    assert unchanged(model, before)


def test_what_is_left_dense_is_bit_equal():
    dense, model = BY_ID["llama"].build(), lb.quantize(BY_ID["llama"].build(), lb.LowBitConfig(group_size=32))
    assert torch.equal(model.lm_head.weight, dense.lm_head.weight)
    assert torch.equal(model.model.norm.weight, dense.model.norm.weight)
    assert type(model.lm_head) is FlatLinear


@pytest.mark.parametrize("group_size", [4, None, "tensor"])
def test_restoring_gives_the_dense_classes_and_trainable_numbers(group_size):
    low = converted(Layers(), 4, group_size)
    numbers = {name: module.dense_weight() for name, module in low.named_children()}
    restore_dense(low.modules(), torch.float32)
    dense = Layers()
    assert [type(m) for m in low.modules()] == [type(m) for m in dense.modules()]
    assert {n: p.shape for n, p in low.named_parameters()} == {n: p.shape for n, p in dense.named_parameters()}
    assert all(parameter.requires_grad for parameter in low.parameters())
    assert all(torch.equal(getattr(low, name).weight, number) for name, number in numbers.items())
    assert list(low.named_buffers()) == [] and "lowbit" not in vars(low.linear)
    low.linear(low.embedding(torch.tensor([3]))).sum().backward()
    assert low.linear.weight.grad is not None and low.embedding.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_restoring_in_another_dtype(dtype):
    low = converted(Layers(), 4, 4)
    expected = low.linear.dense_weight().to(dtype)
    restore_dense(low.modules(), dtype)
    assert torch.equal(low.linear.weight, expected)


def test_restoring_some_modules_leaves_the_others():
    low = converted(Layers())
    restore_dense([low.linear], torch.float32)
    assert type(low.linear) is nn.Linear
    assert isinstance(low.conv1d, LowBitModule) and isinstance(low.embedding, LowBitModule)


def test_a_restored_model_can_be_converted_again():
    low = converted(Layers(), 8, None)
    first, step = low.linear.dense_weight(), low.linear.weight_scale
    restore_dense(low.modules(), torch.float32)
    again = converted(low, 8, None).linear
    assert type(again) is LowBitLinear
    assert bool(((again.dense_weight() - first).abs() <= step).all())


@pytest.mark.parametrize("row_id", ["llama-tied", "bart", "t5-relu"])
def test_ties_are_kept_both_ways(row_id):
    model = BY_ID[row_id].build()
    table = next(name for name, module in model.named_modules() if isinstance(module, nn.Embedding))
    held = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    tied = {name for name, key in held.items() if key == held[f"{table}.weight"]}
    assert len(tied) > 1
    modules = None if row_id == "t5-relu" else {table: lb.Scheme(3, 32)}
    lb.quantize(model, lb.LowBitConfig(group_size=32, modules=modules))
    for suffix in ("", "_scale", "_zero_point") if modules else ("",):
        assert len({id(model.get_parameter(name + suffix)) for name in tied}) == 1
    restore_dense(model.modules(), torch.float32)
    after = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    assert after.keys() == held.keys() and len({after[name] for name in tied}) == 1


def test_flatten_head_takes_plain_output_layers_only():
    model = BY_ID["llama"].build()
    flatten_head(model)
    assert type(model.lm_head) is FlatLinear
    whole = Layers()
    flatten_head(whole)
    assert type(whole.linear) is nn.Linear


@pytest.mark.parametrize("load_packed", [True, False], ids=["packed", "on-the-fly"])
def test_prepare_makes_room_for_what_a_checkpoint_holds(load_packed):
    """As transformers loads: classes first, on the meta device, then numbers."""
    with torch.device("meta"):
        model = Layers()
    config = lb.LowBitConfig(modules={"re:.*": lb.Scheme(3, 4)})
    prepare(find_targets(model, config), load_packed=load_packed, device="meta")
    expected = converted(Layers(), 3, 4).state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    weights = {f"{kind}.weight" for kind in ("linear", "conv1d", "embedding")}
    same = found.keys() if load_packed else found.keys() - weights
    assert {n: (found[n].shape, found[n].dtype) for n in same} == {
        n: (expected[n].shape, expected[n].dtype) for n in same
    }
    if load_packed:
        model.load_state_dict(expected, assign=True)
    else:
        assert {found[n].dtype for n in weights} == {torch.float32}
        # still dense, so it follows the dtype; the scales do not
        model.half()
        assert model.linear.weight.dtype == torch.float16 and model.linear.weight_scale.dtype == torch.bfloat16


def test_converting_twice_names_the_reason():
    with pytest.raises(ValueError, match="already low-bit"):
        converted(converted(Layers()))
    with pytest.raises(ValueError, match="`linear`: already low-bit"):
        find_targets(converted(Layers()), lb.LowBitConfig())


def test_inference_mode_and_no_grad():
    expected = converted(Layers()).state_dict()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = converted(Layers()).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_targets_without_a_decision_are_left_alone():
    model = Layers()
    targets = find_targets(model, lb.LowBitConfig(modules_to_not_convert=["conv1d"]))
    convert(targets)
    assert [type(m).__name__ for m in model.children()] == ["LowBitLinear", "Conv1D", "Embedding"]
