"""`DQTConfig`: fields, defaults, JSON, and its kinship with LowBitConfig."""

import json

import pytest
import torch
from transformers.utils.quantization_config import QuantizationConfigMixin

import hf_lowbit as lb


def test_defaults():
    config = lb.DQTConfig()
    assert (config.bits, config.group_size, config.forward_bits) == (8, None, None)
    assert (config.symmetric, config.activations, config.activation_bits) == (True, "float", "float")
    assert (config.scale, config.grad_dtype) == ("fixed", None)
    assert isinstance(config, lb.LowBitConfig) and isinstance(config, QuantizationConfigMixin)


@pytest.mark.parametrize(
    ("fields", "activations"),
    [
        ({"bits": "ternary"}, "int8"),
        ({"bits": 8, "forward_bits": "ternary"}, "int8"),
        ({"bits": 8, "forward_bits": "ternary", "activation_bits": "float"}, "float"),
        ({"bits": 8}, "float"),
        ({"bits": 8, "activation_bits": 8}, "int8"),
    ],
    ids=str,
)
def test_activations_follow_the_forward_pass(fields, activations):
    assert lb.DQTConfig(**fields).activations == activations


FIELDS = [{}, {"bits": "ternary"}, {"bits": 8, "forward_bits": "ternary", "scale": "learned"},
          {"bits": 4, "group_size": 64, "modules_to_not_convert": ["mlp"]}, {"grad_dtype": "bfloat16"},
          {"bits": 2, "group_size": "tensor", "activation_bits": 8}]  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_json_round_trip(fields):
    config = lb.DQTConfig(**fields)
    text = json.dumps(config.to_dict())
    again = lb.LowBitConfig.from_dict(json.loads(text))
    assert isinstance(again, lb.DQTConfig) and again == config
    assert lb.DQTConfig.from_dict(json.loads(text)) == config
    assert json.dumps(again.to_dict()) == text
    assert "DQTConfig" in repr(config)


def test_a_plain_config_stays_plain():
    config = lb.LowBitConfig.from_dict(lb.LowBitConfig(bits=4).to_dict())
    assert not isinstance(config, lb.DQTConfig) and config.training is None
    assert lb.LowBitConfig(bits=8, group_size=None) != lb.DQTConfig(bits=8)


def test_forward_bits_equal_to_bits_are_the_codes_themselves():
    assert lb.DQTConfig(bits="ternary", forward_bits="ternary").forward_bits is None


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"bits": 5}, "`bits`=5"),
        ({"bits": True}, "`bits`=True"),
        ({"bits": 3.2}, "`bits`=3.2"),
        ({"group_size": 0}, "`group_size`=0"),
        ({"forward_bits": 4}, "`forward_bits`=4"),
        ({"bits": 2, "forward_bits": "ternary"}, "`forward_bits`='ternary'"),
        ({"activation_bits": 4}, "`activation_bits`=4"),
        ({"activation_bits": True}, "`activation_bits`=True"),
        ({"scale": "free"}, "`scale`='free'"),
        ({"grad_dtype": torch.float64}, "`grad_dtype`"),
        ({"forwards_bits": "ternary"}, "did you mean `forward_bits`"),
        ({"modules_to_not_convert": "mlp"}, "`modules_to_not_convert`"),
        ({"training": {"method": "else"}}, "`training`"),
        ({"training": {"method": "dqt", "rate": 1}}, "no field 'rate'"),
    ],
    ids=str,
)
def test_wrong_values_are_named(fields, match):
    with pytest.raises((TypeError, ValueError), match=match):
        lb.DQTConfig(**fields)


def test_an_older_reader_refuses_the_training_section():
    """It would read the codes as the forward pass, which they need not be; so it must not read them at all."""
    with pytest.raises(TypeError, match="no field `training`"):
        lb.LowBitConfig(**lb.DQTConfig().to_dict())


def test_frozen_config_is_that_of_the_forward_pass():
    frozen = lb.DQTConfig(bits=8, forward_bits="ternary").frozen()
    assert type(frozen) is lb.LowBitConfig
    assert (frozen.bits, frozen.activations, frozen.symmetric) == ("ternary", "int8", True)
    assert lb.DQTConfig(bits=4).frozen().bits == 4
