"""`CodesParameter`: a float parameter to PyTorch, packed codes in memory."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import hf_lowbit as lb
from hf_lowbit.configs.scheme import Scheme
from hf_lowbit.functional.grid import BITS
from hf_lowbit.nn.packed import PackedWeight, quantize_weight
from hf_lowbit.nn.slot import CodesParameter, make_parameter


def make(bits=8, group_size=None, transposed=False, dtype=torch.float32, shape=(6, 20)):
    torch.manual_seed(0)
    packed = PackedWeight(Scheme(bits, group_size, True), shape[::-1] if transposed else shape, transposed)
    stored = quantize_weight(torch.randn(packed.shape), packed)
    return make_parameter(stored[""], stored["_scale"], stored.get("_zero_point"), packed, dtype)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
def test_is_a_float_parameter_of_the_dense_shape(bits, transposed):
    weight = make(bits, transposed=transposed)
    assert isinstance(weight, nn.Parameter) and isinstance(weight, CodesParameter)
    assert weight.shape == ((20, 6) if transposed else (6, 20))
    assert weight.dtype == torch.float32 and weight.requires_grad and weight.is_leaf
    assert weight.stored.dtype == torch.int8


def test_reading_dequantizes():
    weight = make()
    dense = weight.dense()
    assert torch.equal(weight + 0, dense) and torch.equal(weight.detach().abs().sum(), dense.abs().sum())
    assert torch.equal(weight.t() @ torch.eye(6), dense.t())
    assert torch.equal(torch.stack([weight.detach()])[0], dense)
    assert type(weight.detach() * 2) is torch.Tensor


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda w: w.data.add_(1.0), id="add"),
        pytest.param(lambda w: w.data.mul_(0.9), id="mul"),
        pytest.param(lambda w: w.data.zero_(), id="zero"),
        pytest.param(lambda w: nn.init.normal_(w), id="init"),
        pytest.param(lambda w: torch.add(w.data, 1.0, out=w.data), id="out"),
        pytest.param(lambda w: w.data.copy_(torch.randn(6, 20)), id="copy-off-the-grid"),
        pytest.param(lambda w: w.data.__setitem__(0, 1.0), id="setitem"),
    ],
)
def test_writing_floats_raises_and_leaves_the_codes(write):
    weight = make()
    before = weight.stored.clone()
    with pytest.raises(RuntimeError):
        with torch.no_grad():
            write(weight)
    assert torch.equal(weight.stored, before)


OPTIMIZERS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam]


@pytest.mark.parametrize("mode", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.__name__)
def test_no_other_optimizer_moves_it(optimizer, mode):
    if "fused" in mode and optimizer in (torch.optim.RMSprop, torch.optim.NAdam):
        pytest.skip("has no fused form")
    weight = make()
    before = weight.stored.clone()
    weight.grad = torch.randn(6, 20)
    with pytest.raises(RuntimeError, match="DQTCallback"):
        optimizer([weight], lr=0.1, **mode).step()
    assert torch.equal(weight.stored, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_numbers_on_the_grid_are_copied_exactly(bits, dtype):
    """What DDP does when it sends the first rank's weights."""
    weight, other = make(bits, dtype=dtype), make(bits, dtype=dtype)
    other.stored.zero_()
    other.data.copy_(weight.dense())
    assert torch.equal(other.dense(), weight.dense())


def test_gradient_clipping_and_zero_grad():
    weight = make()
    (weight * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full((6, 20), 3.0))
    nn.utils.clip_grad_norm_([weight], 1.0)
    assert weight.grad.norm() == pytest.approx(1.0, rel=1e-5)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.zero_grad()
    assert weight.grad is None


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_are_independent(way):
    weight = make(4)
    weight.grad = torch.ones(6, 20) if way == "deepcopy" else None
    if way == "deepcopy":
        other = copy.deepcopy(weight)
        assert torch.equal(other.grad, weight.grad) and other.grad is not weight.grad
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(weight))
    else:
        buffer = io.BytesIO()
        torch.save(weight, buffer)
        other = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert isinstance(other, nn.Parameter) and other.requires_grad and torch.equal(other.dense(), weight.dense())
    before = weight.dense()
    other.stored.zero_()
    other.scale.mul_(2)
    assert torch.equal(weight.dense(), before)


def test_detach_shares_and_clone_does_not():
    weight = make()
    assert weight.detach().stored.data_ptr() == weight.stored.data_ptr()
    assert weight.clone().stored.data_ptr() != weight.stored.data_ptr()


def test_dtype_changes_are_only_apparent():
    weight = make()
    half = weight.detach().to(torch.bfloat16)
    assert half.dtype == torch.bfloat16 and torch.equal(half.stored, weight.stored)
    assert torch.equal(half.dense(), weight.dense().to(torch.bfloat16))


def test_like_tensors_are_plain():
    weight = make(dtype=torch.bfloat16)
    for made in (torch.zeros_like(weight), torch.empty_like(weight), weight.new_zeros(3), torch.ones_like(weight)):
        assert type(made) is torch.Tensor and made.dtype == torch.bfloat16


WRITES = {
    "index": lambda w: w[0].zero_(),
    "item": lambda w: w[0].__setitem__(1, 3.0),
    "flat": lambda w: w.view(-1).mul_(2),
    "transposed": lambda w: w.t().copy_(torch.zeros_like(w.t())),
    "view-of-a-view": lambda w: w.view(-1)[:4].unsqueeze(0).add_(1),
    "narrow": lambda w: w.narrow(0, 0, 2).fill_(1.0),
    "chunks": lambda w: w.chunk(2)[1].zero_(),
    "unbind": lambda w: w.unbind(0)[0].zero_(),
    "data": lambda w: w.data.view(-1).zero_(),
    "detached": lambda w: w.detach()[1:].zero_(),
    "out": lambda w: torch.add(w[0], 1, out=w[0]),
    "init": lambda w: torch.nn.init.normal_(w[:2]),
}


@pytest.mark.parametrize("name", list(WRITES))
def test_writing_into_a_view_raises(name):
    """A view is a copy: the write would be lost."""
    weight = lb.quantize(torch.nn.Sequential(torch.nn.Linear(8, 6)), lb.DQTConfig(bits=8))[0].weight
    before = weight.dense().clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match="trained by direct updates only"):
        WRITES[name](weight)
    assert torch.equal(weight.dense(), before)


def test_views_are_read_like_any_tensor():
    weight = lb.quantize(torch.nn.Sequential(torch.nn.Linear(8, 6)), lb.DQTConfig(bits=8))[0].weight
    dense = weight.dense()
    view = weight.detach()[1:3].t()
    expected = dense[1:3].t()
    assert torch.equal(view + 0, expected) and view.tolist() == expected.tolist()
    assert (view.numpy() == expected.numpy()).all() and view[0, 0].item() == expected[0, 0].item()
    assert torch.equal(torch.cat([view, view]), torch.cat([expected, expected]))
    assert torch.equal(torch.ones(2, 8) @ view, torch.ones(2, 8) @ expected)
    copied = view.clone()
    copied.zero_()
    assert not copied.any() and str(float(expected[0, 0]))[:4] in repr(view)


def test_gradients_flow_through_views():
    weight = lb.quantize(torch.nn.Sequential(torch.nn.Linear(8, 6)), lb.DQTConfig(bits=8))[0].weight
    (weight.t()[2:4] * 3).sum().backward()
    expected = torch.zeros(6, 8)
    expected[:, 2:4] = 3
    assert torch.equal(weight.grad, expected)
