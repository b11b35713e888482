"""`LowBitConfig` as JSON: plain, complete, equal when it is read back, whatever transformers calls to write it.

Public reports: pytorch/ao#1704, huggingface/transformers#36206, #23876 and #37520, dropbox/hqq#107.
"""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, TrainingArguments
from transformers.quantizers.auto import AutoQuantizationConfig

from hf_lowbit import LowBitConfig, Scheme


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12)
GROUP_SIZES = st.one_of(st.none(), st.just("tensor"), st.integers(1, 4096))


@st.composite
def schemes(draw):
    bits = draw(st.sampled_from(["ternary", 2, 3, 4, 8]))
    symmetric = draw(st.sampled_from([None, True] if bits == "ternary" else [None, True, False]))
    return Scheme(bits, draw(GROUP_SIZES), symmetric, draw(st.sampled_from([None, "float", "int8"])))


@st.composite
def configs(draw):
    default, modules = draw(schemes()), draw(st.dictionaries(NAMES, schemes(), max_size=3))
    recorded = draw(st.booleans())
    shapes = st.lists(st.integers(0, 1 << 20), min_size=2, max_size=3)
    return LowBitConfig(
        **default.to_dict(),
        modules={name: {**s.to_dict(), "shape": draw(shapes)} if recorded else s for name, s in modules.items()},
        modules_to_not_convert=draw(st.lists(NAMES, max_size=3)),
        dequantize=draw(st.booleans()),
    )


@given(configs())
def test_read_back_equal(config):
    data = json.loads(config.to_json_string())
    again = LowBitConfig.from_dict(data)
    assert again == config
    assert again.shapes == config.shapes and again.modules == config.modules
    assert data == config.to_dict() == config.to_diff_dict() == dict(config)


@given(configs())
def test_nothing_but_json_types(config):
    def check(value):
        assert type(value) in (dict, list, str, int, bool, type(None)), value
        for item in value.items() if type(value) is dict else value if type(value) is list else ():
            check(list(item) if type(item) is tuple else item)

    check(config.to_dict())


def config_with_objects():
    """A config that has been handed what JSON can't hold."""
    with pytest.warns(UserWarning, match="calibration"):
        config = LowBitConfig(method="rtn", calibration=[torch.ones(2)])
    config.requested = {"dtype": torch.bfloat16}
    config.compute_dtype = torch.bfloat16
    return config


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda config: json.dumps(config.to_dict()), id="to_dict"),
        pytest.param(lambda config: json.dumps(config.to_diff_dict()), id="to_diff_dict"),
        pytest.param(lambda config: json.dumps(dict(config)), id="dict"),
        pytest.param(lambda config: config.to_json_string(), id="to_json_string"),
        pytest.param(lambda config: config.to_json_string(use_diff=False), id="to_json_string-full"),
        pytest.param(lambda config: repr(config).removeprefix("LowBitConfig "), id="repr"),
        pytest.param(lambda config: LlamaConfig(quantization_config=config).to_json_string(), id="model-config"),
        pytest.param(
            lambda config: LlamaConfig(quantization_config=config).to_json_string(use_diff=False),
            id="model-config-full",
        ),
    ],
)
def test_torch_objects_never_reach_the_text(write):
    text = write(config_with_objects())
    assert isinstance(json.loads(text), dict)
    assert "torch" not in text and "tensor(" not in text and "calibration" not in text


def test_trainer_logging_can_write_it(tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    logged = {**arguments.to_dict(), **LlamaConfig(quantization_config=LowBitConfig(bits=2)).to_dict()}
    assert json.loads(json.dumps(logged))["quantization_config"]["bits"] == 2


def test_model_config_file_holds_it(tmp_path):
    config = LowBitConfig(bits=3, modules={"up": {"bits": 8, "shape": [2, 3]}})
    LlamaConfig(quantization_config=config).save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert LowBitConfig.from_dict(data) == config
    assert data["quant_method"] == "hf_lowbit" and data["format_version"] == 1


def test_json_file_is_read_back_equal(tmp_path):
    config = LowBitConfig(bits="ternary", modules_to_not_convert=["head"])
    config.to_json_file(tmp_path / "quantization.json")
    assert LowBitConfig.from_dict(json.loads((tmp_path / "quantization.json").read_text())) == config


def test_transformers_finds_the_class_by_quant_method():
    config = AutoQuantizationConfig.from_dict({"quant_method": "hf_lowbit", "bits": 8})
    assert type(config) is LowBitConfig and config == LowBitConfig(bits=8)


def test_from_dict_leaves_its_argument_alone():
    data = LowBitConfig(bits=3, modules={"up": {"bits": 8, "shape": [2, 3]}}).to_dict()
    text = json.dumps(data)
    LowBitConfig.from_dict(data)
    assert json.dumps(data) == text


def test_from_dict_hands_back_what_is_not_its_own():
    config, unused = LowBitConfig.from_dict({"bits": 8}, return_unused_kwargs=True, revision="main", dequantize=True)
    assert unused == {"revision": "main"}
    assert config.dequantize
