"""Trainable layers: state dict, dtype and device moves, copies, and the way to and from plain low-bit layers."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import hf_lowbit as lb
from hf_lowbit.nn.arming import arm, disarm, trainable_modules
from hf_lowbit.nn.linear import LowBitConv1D, LowBitLinear
from hf_lowbit.nn.trainable import TrainableConv1D, TrainableLinear, Training


FIELDS = [
    pytest.param({"bits": 8}, id="8"),
    pytest.param({"bits": 8, "forward_bits": "ternary"}, id="8-ternary-forward"),
    pytest.param({"bits": 4, "group_size": 16}, id="4-groups"),
    pytest.param({"bits": 3, "forward_bits": "ternary", "group_size": 16}, id="3-ternary-forward-groups"),
    pytest.param({"bits": 2, "group_size": "tensor"}, id="2-tensor"),
    pytest.param({"bits": "ternary"}, id="ternary"),
    pytest.param({"bits": 8, "scale": "learned", "activation_bits": 8}, id="8-learned-int8"),
]


class Block(nn.Module):
    """A linear layer, GPT-2's kind of layer, and one with a single weight."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(40, 24)
        self.down = Conv1D(40, 24)
        self.one = nn.Linear(1, 1)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) * self.one(x[..., :1])


def block(**fields):
    torch.manual_seed(0)
    return lb.quantize(Block(), lb.DQTConfig(**fields))


def x():
    return torch.randn(5, 40, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("fields", FIELDS)
def test_state_dict_holds_plain_tensors_and_loads_back(fields):
    module, other = block(**fields), block(**fields)
    state = module.state_dict()
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    assert state["up.weight"].dtype == torch.int8 and state["up.weight"].shape[0] == 1
    for _, m in trainable_modules(other):
        m.stored().zero_()
        m.weight_scale.data.mul_(3)
    assert not torch.equal(other(x()), module(x()))
    other.load_state_dict(state)
    assert torch.equal(other(x()), module(x()))
    with torch.no_grad():
        assert torch.equal(other(x()), module(x()))


def test_state_dict_keeps_no_graph_and_no_slot():
    keys = set(block(bits=8).state_dict())
    assert {"up.weight", "up.weight_scale", "up.bias"} <= keys and not any("slot" in key for key in keys)


def test_floats_are_not_loaded_as_codes():
    module = block(bits=8)
    state = {**module.state_dict(), "up.weight": torch.randn(1, 24, 40)}
    with pytest.raises(RuntimeError, match=r"torch\.int8"):
        module.load_state_dict(state)


@pytest.mark.parametrize("fields", FIELDS)
def test_frozen_layers_compute_the_same_bit_for_bit(fields):
    module = block(**fields)
    with torch.no_grad():
        before = module(x())
    dense = module.up.dense_weight()
    assert disarm(module) == ["up", "down", "one"]
    assert type(module.up) is LowBitLinear and type(module.down) is LowBitConv1D
    with torch.no_grad():
        assert torch.equal(module(x()), before)
    assert torch.equal(module.up.dense_weight(), dense)
    assert not any(p.requires_grad for n, p in module.named_parameters() if "bias" not in n)


def test_arming_again_continues_with_the_same_codes():
    module = block(bits=4)
    codes = module.up.codes().clone()
    disarm(module)
    assert arm(module, Training(), torch.float32, {"up"}) == ["up"]
    assert type(module.up) is TrainableLinear and type(module.down) is LowBitConv1D
    assert torch.equal(module.up.codes(), codes)


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_are_whole_and_independent(way, fields):
    module = block(**fields)
    if way == "deepcopy":
        other = copy.deepcopy(module)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(module))
    else:
        buffer = io.BytesIO()
        torch.save(module, buffer)
        other = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert torch.equal(other(x()), module(x()))
    before = module(x())
    other.up.stored().zero_()
    assert torch.equal(module(x()), before)
    # the weight of the copy reads the scale of the copy
    other.up.weight_scale.data.fill_(2.0)
    assert (other.up.weight.scale == 2.0).all() and not (module.up.weight.scale == 2.0).all()


def test_dtype_moves_keep_codes_and_scales():
    module = block(bits=8, scale="learned")
    codes, scale = module.up.codes().clone(), module.up.weight_scale.detach().clone()
    module.to(torch.bfloat16)
    assert module.up.weight.dtype == torch.bfloat16 and module.up.bias.dtype == torch.bfloat16
    assert torch.equal(module.up.codes(), codes) and torch.equal(module.up.weight_scale, scale)
    assert module.up.weight_scale.dtype == torch.float32
    module(x().bfloat16()).sum().backward()
    assert module.up.weight.grad.dtype == torch.bfloat16
    weight = module.up.weight
    assert module.to(torch.bfloat16).up.weight is weight, "a move that changes nothing keeps the parameter"
    assert module.float().up.weight.grad.dtype == torch.float32


def test_meta_and_back():
    module = block(bits=4)
    state = module.state_dict()
    shell = copy.deepcopy(module).to("meta")
    assert shell.up.weight.device.type == "meta" and shell.up.stored().device.type == "meta"
    shell.to_empty(device="cpu")
    shell.load_state_dict(state)
    assert torch.equal(shell(x()), module(x()))


def test_coarse_form_is_made_once_until_the_codes_change():
    module = block(bits=8, forward_bits="ternary")
    with torch.no_grad():
        module(x())
        first = module.up.forward_tensors()[0]
        assert module.up.forward_tensors()[0] is first
        module.up.stored().neg_()
        assert torch.equal(module.up.forward_tensors()[0], first) is False
        assert module.up.forward_tensors()[0] is not first


def test_frozen_weights_take_no_gradient_but_pass_it_on():
    module = block(bits=8, forward_bits="ternary")
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    inputs = x().requires_grad_()
    module(inputs).sum().backward()
    assert inputs.grad.abs().sum() > 0 and module.up.weight.grad is None


def test_kinds():
    module = block(bits=8)
    assert type(module.up) is TrainableLinear and type(module.down) is TrainableConv1D
    assert isinstance(module.up, nn.Linear) and isinstance(module.down, Conv1D)
    assert module.up.weight.shape == (24, 40) and module.down.weight.shape == (24, 40)


@pytest.mark.parametrize("fields", FIELDS)
def test_codes_shows_what_is_stored(fields):
    module = block(**fields)
    codes, scale, _ = lb.codes(module.up)
    assert codes.dtype == torch.int8 and codes.shape == (24, 40) and scale.ndim == 2
    codes, _, _ = lb.codes(module.down)
    assert codes.shape == (24, 40)
