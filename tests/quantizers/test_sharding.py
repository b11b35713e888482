"""Checkpoints in several files: the limit is kept, the index is complete, codes may lie apart from their scales.

Public reports: huggingface/transformers#32056, modelscope/ms-swift#2586, AutoGPTQ/AutoGPTQ#319 and #364.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from tests.quantizers.architectures import BY_ID


# below the size of a layer's codes, so that they lie apart from their scales
LIMIT = 2000
FIELDS = {"bits": 3, "group_size": 32}
INDEX = "model.safetensors.index.json"


def index_of(folder):
    return json.loads((folder / INDEX).read_text())


@pytest.fixture(scope="module", params=["qwen2", "mixtral", "gpt2"])
def sharded(request, lowbit_folder, tmp_path_factory):
    """(architecture, model, folder with its shards of at most 2 KB)"""
    folder = tmp_path_factory.mktemp("sharded")
    model = AutoModelForCausalLM.from_pretrained(lowbit_folder(request.param, **FIELDS))
    model.save_pretrained(folder, max_shard_size="2KB")
    return BY_ID[request.param], model, folder


def test_reload_is_bit_equal(sharded):
    architecture, model, folder = sharded
    assert torch.equal(architecture(AutoModelForCausalLM.from_pretrained(folder)), architecture(model))


def test_limit_is_kept_and_index_complete(sharded):
    _, model, folder = sharded
    shards = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert len(shards) > 2
    for tensors in shards.values():
        # a tensor is never cut: one that is larger lies alone
        assert len(tensors) == 1 or sum(t.numel() * t.element_size() for t in tensors.values()) <= LIMIT
    found = {key: name for name, tensors in shards.items() for key in tensors}
    assert index_of(folder)["weight_map"] == found
    # a tied output layer is stored with the table
    assert [name for name in model.state_dict() if name not in found and not name.startswith("lm_head")] == []


def test_codes_and_scales_lie_apart(sharded):
    """Otherwise the tests above would not show that loading survives it."""
    _, _, folder = sharded
    places = index_of(folder)["weight_map"]
    pairs = [(key, key + suffix) for key in places for suffix in ("_scale", "_zero_point") if key + suffix in places]
    assert any(places[codes] != places[companion] for codes, companion in pairs)


def test_index_counts_the_dense_parameters(sharded):
    _, model, folder = sharded
    metadata = index_of(folder)["metadata"]
    assert metadata["total_parameters"] == model.num_parameters()


@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight_scale"])
def test_missing_shard_is_an_error(lowbit_folder, tmp_path, tensor):
    model = AutoModelForCausalLM.from_pretrained(lowbit_folder("qwen2", **FIELDS))
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    shard = index_of(tmp_path)["weight_map"][tensor]
    (tmp_path / shard).unlink()
    with pytest.raises(ValueError, match=f"{shard}` is missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_shard_without_its_tensor_is_an_error(lowbit_folder, tmp_path):
    """The index promises what the shard, replaced by another, does not hold."""
    model = AutoModelForCausalLM.from_pretrained(lowbit_folder("qwen2", **FIELDS))
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    places = index_of(tmp_path)["weight_map"]
    tensor = "model.layers.1.mlp.up_proj.weight"
    other = next(name for name in places.values() if name != places[tensor])
    shutil.copy(tmp_path / other, tmp_path / places[tensor])
    with pytest.raises(ValueError, match="model.layers.1.mlp.up_proj.weight` is missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_dense_shards_are_quantized_on_the_fly(dense_folder, lowbit_folder, tmp_path):
    """The experts of a layer are collected from several shards before they are fused and rounded."""
    architecture = BY_ID["mixtral"]
    architecture.build().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=lb.LowBitConfig(**FIELDS))
    whole = AutoModelForCausalLM.from_pretrained(lowbit_folder("mixtral", **FIELDS))
    assert torch.equal(architecture(model), architecture(whole))
