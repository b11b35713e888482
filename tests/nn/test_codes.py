"""`codes`: the integers in the orientation of the dense weight, and sentences where there are none."""

import pytest
import torch
from torch import nn

import hf_lowbit as lb
from tests.nn.models import Layers, converted
from tests.quantizers.architectures import BY_ID


def spread(per_group, width, size, dim):
    """One value a weight of one value a group, along `dim`."""
    return per_group if per_group.shape[dim] == 1 else per_group.repeat_interleave(size, dim).narrow(dim, 0, width)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero-points"])
@pytest.mark.parametrize("group_size", [4, None, "tensor"])
@pytest.mark.parametrize(("name", "dim"), [("linear", 1), ("conv1d", 0), ("embedding", 1)])
def test_scale_times_codes_is_the_dense_weight(name, dim, group_size, symmetric):
    low = getattr(converted(Layers(), 3, group_size, symmetric), name)
    q, scale, zero_point = lb.codes(low)
    assert q.dtype == torch.int8 and q.shape == getattr(Layers(), name).weight.shape
    steps = q.float()
    if symmetric:
        assert zero_point is None
    else:
        assert zero_point.shape == scale.shape and zero_point.dtype == torch.int8
        steps = steps - spread(zero_point, 10, 4, dim)
    weight = spread(scale.float(), 10, 4, dim) * steps
    assert torch.equal(weight, low.dense_weight())


@pytest.mark.parametrize(("row_id", "shape"), [("mixtral", (4, 192, 64)), ("gpt-oss", (4, 64, 192))])
def test_experts_need_the_name_of_the_weight(row_id, shape):
    model = lb.quantize(BY_ID[row_id].build(), lb.LowBitConfig(group_size=32))
    experts = model.model.layers[0].mlp.experts
    q, scale, _ = lb.codes(experts, "gate_up_proj")
    assert q.shape == shape
    dim = shape.index(64)
    assert scale.shape == tuple(2 if i == dim else n for i, n in enumerate(shape))
    weight = scale.float().repeat_interleave(32, dim) * q.float()
    assert torch.equal(weight, experts.dense_weight("gate_up_proj"))
    with pytest.raises(ValueError, match="holds several weights; say which: `parameter` is one of .*'gate_up_proj'"):
        lb.codes(experts)
    with pytest.raises(ValueError, match="`parameter`='up_proj' is not low-bit in LowBit.*Experts"):
        lb.codes(experts, "up_proj")


def test_the_only_weight_may_be_named():
    low = converted(Layers()).linear
    assert torch.equal(lb.codes(low, "weight")[0], lb.codes(low)[0])


@pytest.mark.parametrize(
    "module", [nn.Linear(2, 2), Layers(), "linear", None], ids=["linear", "model", "text", "none"]
)
def test_what_is_not_low_bit_is_refused(module):
    with pytest.raises(TypeError, match=f"{type(module).__name__} is not low-bit: it has no codes"):
        lb.codes(module)


def test_ternary_codes_are_the_three():
    assert set(lb.codes(converted(Layers(), "ternary").linear)[0].unique().tolist()) <= {-1, 0, 1}


def test_nothing_is_attached_to_the_module():
    low = converted(Layers(), 8, None).linear
    before = low.weight.clone()
    q, scale, _ = lb.codes(low)
    assert not q.requires_grad and not scale.requires_grad
    q.zero_()
    assert torch.equal(low.weight, before)
