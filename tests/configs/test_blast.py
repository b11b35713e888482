"""`BlastConfig`: refusals in sentences, plain JSON, and one identity with the other configs."""

import copy
import json

import pytest
from transformers.quantizers.auto import AutoQuantizationConfig

import hf_lowbit as lb
from hf_lowbit.configs.blast import BlockLayout, kept_blocks


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, 1.5, float("nan")])
def test_sparsity_outside_the_unit_interval(sparsity):
    with pytest.raises(ValueError, match=r"`sparsity`=.* is not in \[0, 1\)"):
        lb.BlastConfig(sparsity=sparsity)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        pytest.param({"sparsity": "0.9"}, TypeError, "`sparsity`='0.9'", id="sparsity-text"),
        pytest.param({"sparsity": True}, TypeError, "`sparsity`=True", id="sparsity-bool"),
        pytest.param({"block_size": 4}, ValueError, "`block_size`=4 must be from 8 to 128", id="small-block"),
        pytest.param({"block_size": (32, 256)}, ValueError, "from 8 to 128", id="large-block"),
        pytest.param({"block_size": 32.0}, TypeError, "`block_size`=32.0", id="float-block"),
        pytest.param({"block_size": (32,)}, TypeError, "`block_size`", id="one-side"),
        pytest.param({"targets": "ffn"}, ValueError, "`targets`='ffn'", id="target"),
        pytest.param({"targets": []}, TypeError, "`targets`", id="no-target"),
        pytest.param({"balance": "column"}, ValueError, "`balance`='column'", id="balance"),
        pytest.param({"dense_layers": "first"}, TypeError, "`dense_layers`", id="dense-layers"),
        pytest.param({"dense_layers": {"middle": 1}}, ValueError, "`dense_layers`", id="dense-layers-key"),
        pytest.param({"overrides": {"mlp": {"bits": 4}}}, ValueError, "`overrides", id="override-field"),
        pytest.param({"overrides": {"mlp": {"sparsity": 1}}}, ValueError, "overrides", id="override-value"),
        pytest.param({"one_shot": True}, ValueError, "ruins a model", id="one-shot"),
        pytest.param({"bits": 2}, ValueError, "`bits`=2 is not supported for live blocks", id="bits"),
        pytest.param({"bits": 4.0}, ValueError, "`bits`=4.0 is not supported for live blocks", id="float-bits"),
        pytest.param({"rest": 8}, TypeError, "`rest` must be a LowBitConfig", id="rest"),
        pytest.param({"rest": lb.BlastConfig()}, ValueError, "`rest` says", id="rest-sparse"),
        pytest.param({"sparsty": 0.5}, TypeError, "did you mean `sparsity`", id="typo"),
    ],
)
def test_bad_fields(fields, error, message):
    with pytest.raises(error, match=message):
        lb.BlastConfig(**fields)


def test_one_shot_through_an_override_is_refused_too():
    with pytest.raises(ValueError, match="ruins a model"):
        lb.BlastConfig(sparsity=0.01, overrides={"mlp": {"sparsity": 0.5}}, one_shot=True)


def config_with_layouts():
    config = lb.BlastConfig(0.75, (16, 32), ["re:.*up_proj"], balance="none", dense_layers={"last": 1},
                            overrides={"mlp": {"sparsity": 0.5, "block_size": 8}}, bits=4,
                            rest=lb.LowBitConfig(bits=8, modules_to_not_convert=["x"]))  # fmt: skip
    config.layouts = {"a.up_proj": BlockLayout((64, 64), (16, 32), "blocks", "none", 3, bits=4)}
    return config


@pytest.mark.parametrize("config", [lb.BlastConfig(), config_with_layouts()], ids=["default", "full"])
def test_json_comes_back_equal(config):
    text = json.dumps(config.to_dict())
    again = lb.LowBitConfig.from_dict(json.loads(text))
    assert type(again) is lb.BlastConfig
    assert again == config and again.layouts == config.layouts and again.sparsity == config.sparsity
    assert json.dumps(again.to_dict()) == text
    assert copy.deepcopy(config) == config and "sparse" in repr(config)
    assert AutoQuantizationConfig.from_dict(json.loads(text)) == config


def test_a_section_of_the_future_is_refused():
    stored = lb.BlastConfig().to_dict()
    stored["sparse"] = {**stored["sparse"], "method": "blast2"}
    with pytest.raises(ValueError, match="upgrade hf_lowbit"):
        lb.LowBitConfig.from_dict(stored)


def test_damaged_layouts_are_refused():
    stored = config_with_layouts().to_dict()
    stored["sparse"]["modules"]["a.up_proj"]["live"] = 1000
    with pytest.raises(ValueError, match=r"sparse.modules\['a.up_proj'\].*`live`=1000"):
        lb.LowBitConfig.from_dict(stored)


@pytest.mark.parametrize(
    ("sparsity", "blocks", "kept"),
    [(0.9, 10, 1), (0.9, 18, 2), (0.99, 10, 1), (0.0, 7, 7), (0.75, 10, 3), (0.5, 5, 3)],
)
def test_kept_blocks(sparsity, blocks, kept):
    assert kept_blocks(sparsity, blocks) == kept
