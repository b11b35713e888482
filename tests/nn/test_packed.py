"""Packed weights: their shapes and bytes, and that nothing a module goes through changes them."""

import pytest
import torch
from torch import nn

from hf_lowbit import Scheme
from hf_lowbit.functional.grid import BITS
from hf_lowbit.nn.packed import PackedWeight, quantize_weight
from tests.nn.models import Layers, converted, random


@pytest.mark.parametrize(
    ("scheme", "shape", "stored"),
    [
        pytest.param(Scheme(4, 4), (6, 10), {"": (1, 6, 5), "_scale": (6, 3)}, id="4-bits-short-group"),
        pytest.param(Scheme(8, None), (6, 10), {"": (1, 6, 10), "_scale": (6, 1)}, id="8-bits-channel"),
        pytest.param(Scheme("ternary", "tensor"), (6, 10), {"": (1, 6, 3), "_scale": (1, 1)}, id="ternary-tensor"),
        pytest.param(
            Scheme(3, 4), (6, 10), {"": (1, 6, 5), "_scale": (6, 3), "_zero_point": (6, 3)}, id="3-bits-zero-points"
        ),
        pytest.param(
            Scheme(2, 4), (5, 6, 10), {"": (5, 1, 6, 3), "_scale": (5, 6, 3), "_zero_point": (5, 6, 3)}, id="experts"
        ),
        pytest.param(Scheme(8, "tensor"), (5, 6, 10), {"": (5, 1, 6, 10), "_scale": (5, 1, 1)}, id="experts-tensor"),
    ],
)
def test_stored_tensors(scheme, shape, stored):
    packed = PackedWeight(scheme, shape)
    dtypes = {"": torch.int8, "_zero_point": torch.int8}
    dtypes["_scale"] = torch.bfloat16 if scheme.block else torch.float32
    assert packed.tensors() == {suffix: (size, dtypes[suffix]) for suffix, size in stored.items()}
    made = quantize_weight(random(*shape), packed)
    assert {suffix: (tuple(t.shape), t.dtype) for suffix, t in made.items()} == packed.tensors()
    assert packed.bytes() == sum(t.nbytes for t in made.values())
    assert packed.parameters == random(*shape).numel()


def test_transposed_shapes_read_the_input_first():
    packed = PackedWeight(Scheme(4, 4), (5, 10, 6), transposed=True)
    assert (packed.in_features, packed.out_features, packed.experts) == (10, 6, (5,))
    assert packed.tensors()[""][0] == (5, 1, 6, 5)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(6, 10), (1, 1), (3, 6, 10), (1, 10)], ids=str)
def test_a_packed_shape_is_never_the_dense_one(bits, shape):
    for group_size in (1, 4, None, "tensor"):
        assert PackedWeight(Scheme(bits, group_size), shape).tensors()[""][0] != shape


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("experts", [(), (3,)], ids=["matrix", "experts"])
def test_rounding_one_expert_is_rounding_a_matrix(experts, transposed):
    weight = random(*experts, 10, 6)
    packed = PackedWeight(Scheme(3, 4), tuple(weight.shape), transposed)
    before = weight.clone()
    stored = quantize_weight(weight, packed)
    assert torch.equal(weight, before)
    matrices = weight.unbind(0) if experts else [weight]
    for index, matrix in enumerate(matrices):
        alone = quantize_weight(
            matrix.t() if transposed else matrix, PackedWeight(Scheme(3, 4), (6, 10) if transposed else (10, 6))
        )
        for suffix, tensor in alone.items():
            assert torch.equal(stored[suffix][index] if experts else stored[suffix], tensor)


def stored_tensors(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if not name.endswith("bias")}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: m.to(torch.float16), id="to-float16"),
        pytest.param(lambda m: m.to(torch.float64), id="to-float64"),
        pytest.param(lambda m: m.to("cpu", torch.bfloat16), id="to-device-and-dtype"),
        pytest.param(lambda m: m.half(), id="half"),
        pytest.param(lambda m: m.bfloat16(), id="bfloat16"),
        pytest.param(lambda m: m.double(), id="double"),
        pytest.param(lambda m: m.half().float(), id="there-and-back"),
        pytest.param(lambda m: m.type(torch.float16), id="type"),
        pytest.param(lambda m: m.cpu(), id="cpu"),
        pytest.param(lambda m: m.train().eval(), id="train"),
        pytest.param(lambda m: m.requires_grad_(False), id="freeze"),
    ],
)
@pytest.mark.parametrize("group_size", [4, None], ids=["bfloat16-scales", "float32-scales"])
def test_codes_and_scales_survive(change, group_size):
    low = converted(Layers(), 3, group_size)
    before = stored_tensors(low)
    change(low)
    after = stored_tensors(low)
    assert before.keys() == after.keys()
    assert all(before[n].dtype == after[n].dtype and torch.equal(before[n], after[n]) for n in before)


def test_the_bias_follows_the_dtype():
    assert converted(Layers()).half().linear.bias.dtype == torch.float16


def test_an_outer_module_converts_what_it_holds():
    low = nn.Sequential(converted(Layers(), 3, 4)).half()
    assert {t.dtype for n, t in low.state_dict().items() if n.endswith("scale")} == {torch.bfloat16}


def test_meta_and_empty_keep_the_dtypes():
    low = converted(Layers(), 3, 4)
    dtypes = {name: (tensor.dtype, tensor.shape) for name, tensor in low.state_dict().items()}
    low.to("meta")
    assert {name: (t.dtype, t.shape) for name, t in low.state_dict().items()} == dtypes
    assert {t.device.type for t in low.state_dict().values()} == {"meta"}
    low.to_empty(device="cpu")
    assert {name: (t.dtype, t.shape) for name, t in low.state_dict().items()} == dtypes
    low.to("meta", torch.float16)
    assert low.linear.weight_scale.dtype == torch.bfloat16 and low.linear.bias.dtype == torch.float16


@pytest.mark.parametrize("change", [lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.type(torch.half)],
                         ids=["half", "to", "type"])  # fmt: skip
def test_tied_layers_stay_tied_and_keep_their_scale(change):
    model = nn.ModuleDict({"table": nn.Embedding(12, 10), "head": nn.Linear(10, 12, bias=False)})
    model["head"].weight = model["table"].weight
    low = converted(model, 3, 4)
    before = stored_tensors(low)
    assert low["head"].weight_scale is low["table"].weight_scale
    change(low)
    for name in ("weight", "weight_scale", "weight_zero_point"):
        assert getattr(low["head"], name) is getattr(low["table"], name)
        assert torch.equal(getattr(low["head"], name), before[f"head.{name}"])
        assert getattr(low["head"], name).dtype == before[f"head.{name}"].dtype


def test_packed_weights_are_parameters_that_do_not_train():
    low = converted(Layers(), 3, 4)
    assert {name for name, p in low.named_parameters() if p.requires_grad} == {"linear.bias", "conv1d.bias"}
    assert "linear.weight_zero_point" in dict(low.named_parameters())
    assert [name for name, _ in low.named_buffers()] == ["embedding.output_like"]


def test_an_absent_zero_point_is_none_and_not_in_the_state():
    low = converted(Layers(), 4, 4)
    assert low.linear.weight_zero_point is None
    assert set(low.linear.state_dict()) == {"weight", "weight_scale", "bias"}


def test_a_state_dict_loads_into_another_model():
    low, other = converted(Layers(), 3, 4), Layers()
    with torch.no_grad():
        other.linear.weight.mul_(-2)
    other = converted(other, 3, 4)
    other.load_state_dict(low.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(low.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_dense_state_dict_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch for linear.weight"):
        converted(Layers(), 8, None).load_state_dict(Layers().state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for linear.weight"):
        Layers().load_state_dict(converted(Layers(), 8, None).state_dict())
