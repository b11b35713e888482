"""Every architecture: quantized while it is read, computed with, saved, reloaded, copied, dequantized."""

import copy
import json
import pickle
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

import hf_lowbit as lb
from hf_lowbit.nn.packed import LowBitModule
from tests.quantizers.architectures import ARCHITECTURES, Architecture


FOUR_BITS = lb.LowBitConfig(bits=4, group_size=32)
EIGHT_BITS = lb.LowBitConfig(bits=8, group_size=32)
# float32 sums in another order
SAME_NUMBERS = 2e-6
# largest error of an 8-bit weight in units of its group's largest: half a step of 1/127, and a scale in bfloat16
WEIGHT_ERROR = 0.5 / 127 + 2**-8


class Case(NamedTuple):
    """One architecture, dense and low-bit. `quantized` was made on the fly, saved in `folder`, and read as `reloaded`.

    `pickled` was made before the first forward: transformers' own output hooks, put in place then, can't be pickled.
    """

    architecture: Architecture
    dense: nn.Module
    dense_folder: Path
    quantized: nn.Module
    pickled: bytes
    folder: Path
    reloaded: nn.Module


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=repr)
def case(request, tmp_path_factory):
    architecture, folder = request.param, tmp_path_factory.mktemp(request.param.id)
    dense = architecture.build()
    dense.save_pretrained(folder / "dense")
    quantized = architecture.auto.from_pretrained(folder / "dense", quantization_config=FOUR_BITS)
    quantized.save_pretrained(folder / "low-bit")
    reloaded = architecture.auto.from_pretrained(folder / "low-bit")
    pickled = pickle.dumps(quantized)
    return Case(architecture, dense, folder / "dense", quantized, pickled, folder / "low-bit", reloaded)


def stored_keys(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def packed_names(model):
    """Full names of the converted parameters."""
    return {f"{name}.{p}" for name, m in model.named_modules() if isinstance(m, LowBitModule) for p in m.lowbit}


def companion_names(model):
    return {f"{name}.{c}" for name, m in model.named_modules() if isinstance(m, LowBitModule) for c in m.companions()}


def assert_same_state(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    different = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert not different


def test_eight_bits_stay_close_to_the_dense_model(case):
    quantized = case.architecture.auto.from_pretrained(case.dense_folder, quantization_config=EIGHT_BITS)
    expected, actual = case.architecture(case.dense), case.architecture(quantized)
    assert (actual - expected).norm() <= case.architecture.tolerance * expected.norm()
    weights = quantized.dequantize().state_dict()
    for name in packed_names(case.quantized):
        weight = case.dense.get_parameter(name)
        assert (weights[name] - weight).abs().max() <= WEIGHT_ERROR * weight.abs().max(), name


def test_four_bits_compute_what_the_codes_say(case):
    dequantized = copy.deepcopy(case.quantized).dequantize()
    assert not any(isinstance(module, LowBitModule) for module in dequantized.modules())
    expected, actual = case.architecture(dequantized), case.architecture(case.quantized)
    assert (actual - expected).norm() <= SAME_NUMBERS * expected.norm()


def test_share_of_parameters(case):
    report = lb.report(case.quantized)
    assert report.lowbit_parameters / report.total_parameters >= case.architecture.share
    assert report.total_parameters == sum(module.parameters for module in report.modules)
    assert report.total_parameters == case.dense.num_parameters()
    assert all(module.reason for module in report.modules)


def test_only_the_named_linear_layers_stay_dense(case):
    linear = [(n, m) for n, m in case.quantized.named_modules() if isinstance(m, (nn.Linear, Conv1D))]
    dense = [name for name, module in linear if not isinstance(module, LowBitModule)]
    patterns = case.architecture.dense
    assert [name for name in dense if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in dense)] == []


def test_what_is_not_converted_is_bit_equal(case):
    converted, companions = packed_names(case.quantized), companion_names(case.quantized)
    expected = case.dense.state_dict()
    actual = case.quantized.state_dict()
    # no bias appears, none is lost
    assert actual.keys() - companions == expected.keys()
    assert [n for n in expected.keys() - converted if not torch.equal(actual[n], expected[n])] == []


def test_load_reports_nothing_missing_nor_unexpected(case):
    for folder, fields in ((case.dense_folder, {"quantization_config": FOUR_BITS}), (case.folder, {})):
        _, info = case.architecture.auto.from_pretrained(folder, output_loading_info=True, **fields)
        assert not any(info.values()), info


def test_reload_is_bit_equal(case):
    assert torch.equal(case.architecture(case.reloaded), case.architecture(case.quantized))
    assert_same_state(case.reloaded, case.quantized)
    assert case.reloaded.config.quantization_config == case.quantized.config.quantization_config


def test_stored_names_are_those_of_the_state_dict(case):
    # Trainer's resume reads the file straight into `load_state_dict`: renamed or split tensors would be lost
    state, stored = case.quantized.state_dict(), stored_keys(case.folder)
    assert stored <= state.keys()
    # tied tensors are stored once
    memory = {state[name].data_ptr() for name in stored}
    assert [name for name in state.keys() - stored if state[name].data_ptr() not in memory] == []


def test_in_memory_equals_on_the_fly(case):
    model = lb.quantize(copy.deepcopy(case.dense), FOUR_BITS)
    assert_same_state(model, case.quantized)
    assert model.config.quantization_config == case.quantized.config.quantization_config
    assert torch.equal(case.architecture(model), case.architecture(case.quantized))


def test_counts_the_parameters_of_the_dense_model(case):
    """Public reports: huggingface/transformers#26132 and #25978, unslothai/unsloth#2855,
    m87-labs/moondream-station#7, ome-projects/ome#638, jundot/omlx#3489, huggingface/huggingface.js#2323.
    """
    for model in (case.quantized, case.reloaded):
        assert model.num_parameters() == case.dense.num_parameters()
        assert model.num_parameters(exclude_embeddings=True) == case.dense.num_parameters(exclude_embeddings=True)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert model.num_parameters(only_trainable=True) == trainable
        assert model.dtype == case.dense.dtype


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_are_equal_and_independent(case, way):
    """Public reports: huggingface/optimum-quanto#358, pytorch/pytorch#56108, ModelCloud/GPTQModel#308,
    huggingface/accelerate#2248.
    """
    expected = case.architecture(case.quantized)
    other = copy.deepcopy(case.quantized) if way == "deepcopy" else pickle.loads(case.pickled)
    assert [type(m) for m in other.modules()] == [type(m) for m in case.quantized.modules()]
    assert torch.equal(case.architecture(other), expected)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(case.architecture(case.quantized), expected)


def test_generates_the_same_tokens_after_reload(case):
    if not case.architecture.generates:
        assert not case.quantized.can_generate()
        return
    tokens = case.architecture.generate(case.quantized)
    assert torch.equal(case.architecture.generate(case.reloaded), tokens)


def test_dequantized_model_saves_as_a_plain_one(case, tmp_path):
    dequantized = copy.deepcopy(case.reloaded).dequantize()
    dequantized.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    # per-expert tensors and old names included
    assert stored_keys(tmp_path) == stored_keys(case.dense_folder)
    plain = case.architecture.auto.from_pretrained(tmp_path)
    assert torch.equal(case.architecture(plain), case.architecture(dequantized))
