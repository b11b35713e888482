"""`Scheme`: what each field accepts, what it defaults to, and the sentence a wrong value gets."""

import copy
import dataclasses
import json
import pickle

import pytest

from hf_lowbit import Scheme


@pytest.mark.parametrize(
    ("bits", "symmetric", "activations"),
    [
        pytest.param("ternary", True, "int8", id="ternary-is-bitnet"),
        pytest.param(2, False, "float", id="two-bits-take-zero-points"),
        pytest.param(3, False, "float", id="three-bits-take-zero-points"),
        pytest.param(4, True, "float", id="four-bits-are-symmetric"),
        pytest.param(8, True, "float", id="eight-bits-are-symmetric"),
    ],
)
def test_defaults_follow_the_bits(bits, symmetric, activations):
    assert Scheme(bits) == Scheme(bits, 128, symmetric, activations)


def test_what_is_given_is_kept():
    scheme = Scheme(3, None, True, "int8")
    assert (scheme.bits, scheme.group_size, scheme.symmetric, scheme.activations) == (3, None, True, "int8")


@pytest.mark.parametrize(
    ("group_size", "block"),
    [
        pytest.param(1, 1, id="one"),
        pytest.param(100, 100, id="any-number"),
        pytest.param(None, None, id="channel"),
        pytest.param("tensor", None, id="tensor"),
    ],
)
def test_block_is_the_group_size_as_a_number(group_size, block):
    assert Scheme(4, group_size).block == block


WRONG = [
    pytest.param({"bits": 5}, ValueError, ["`bits`=5", "'ternary', 2, 3, 4, 8"], id="bits-5"),
    pytest.param({"bits": 1}, ValueError, ["`bits`=1", "'ternary', 2, 3, 4, 8"], id="bits-1"),
    pytest.param({"bits": "4"}, ValueError, ["`bits`='4'", "'ternary', 2, 3, 4, 8"], id="bits-as-text"),
    pytest.param({"bits": "Ternary"}, ValueError, ["`bits`='Ternary'", "'ternary'"], id="bits-capital"),
    pytest.param({"bits": True}, TypeError, ["`bits`=True", "bool", "'ternary', 2, 3, 4, 8"], id="bits-bool"),
    pytest.param({"bits": 4.0}, TypeError, ["`bits`=4.0", "float"], id="bits-float"),
    pytest.param({"bits": [4]}, TypeError, ["`bits`=[4]", "list"], id="bits-list"),
    pytest.param({"bits": None}, TypeError, ["`bits`=None", "NoneType"], id="bits-none"),
    pytest.param({"group_size": 0}, ValueError, ["`group_size`=0", "at least 1", "None", '"tensor"'], id="group-0"),
    pytest.param({"group_size": -1}, ValueError, ["`group_size`=-1", "at least 1"], id="group-negative"),
    pytest.param({"group_size": "channel"}, TypeError, ["`group_size`='channel'", '"tensor"'], id="group-text"),
    pytest.param({"group_size": 64.0}, TypeError, ["`group_size`=64.0", "integer"], id="group-float"),
    pytest.param({"group_size": True}, TypeError, ["`group_size`=True", "integer"], id="group-bool"),
    pytest.param({"symmetric": 1}, TypeError, ["`symmetric`=1", "True, False or None"], id="symmetric-int"),
    pytest.param({"symmetric": "yes"}, TypeError, ["`symmetric`='yes'", "True, False or None"], id="symmetric-text"),
    pytest.param(
        {"bits": "ternary", "symmetric": False}, ValueError, ["`symmetric`=False", "ternary"], id="ternary-z"
    ),
    pytest.param({"activations": "fp8"}, ValueError, ["`activations`='fp8'", "['float', 'int8']"], id="activations"),
    pytest.param({"activations": 8}, ValueError, ["`activations`=8", "['float', 'int8']"], id="activations-int"),
]


@pytest.mark.parametrize(("fields", "error", "parts"), WRONG)
def test_a_wrong_value_is_named_with_what_is_allowed(fields, error, parts):
    with pytest.raises(error) as caught:
        Scheme(**fields)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_scheme_is_a_value():
    scheme = Scheme(3, 64)
    assert scheme == Scheme(3, 64, False, "float")
    assert scheme != Scheme(3, 32)
    assert len({scheme, Scheme(3, 64), Scheme(4, 64)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        scheme.bits = 4


@pytest.mark.parametrize("scheme", [Scheme("ternary", "tensor"), Scheme(8, None, False, "int8")], ids=["ternary", "8"])
def test_copies_and_json_are_equal(scheme):
    assert pickle.loads(pickle.dumps(scheme)) == scheme
    assert copy.deepcopy(scheme) == scheme
    assert Scheme(**json.loads(json.dumps(scheme.to_dict()))) == scheme
