"""`LowBitConfig`: each field's checks and sentences, and what it does with them."""

import copy
import pickle
import warnings

import pytest
import torch

from hf_lowbit import BlastConfig, DQTConfig, LowBitConfig, Scheme


def test_defaults():
    config = LowBitConfig()
    assert config.default_scheme == Scheme(4, 128, True, "float")
    assert (config.method, config.modules, config.modules_to_not_convert) == ("rtn", {}, [])
    assert not config.dequantize and not config.is_resolved


def test_the_default_scheme_follows_the_bits():
    assert LowBitConfig(bits="ternary").default_scheme == Scheme("ternary", 128, True, "int8")
    assert LowBitConfig(bits=2, group_size=32).default_scheme == Scheme(2, 32, False, "float")


WRONG = [
    pytest.param({"bits": 7}, ValueError, ["`bits`=7", "'ternary', 2, 3, 4, 8"], id="bits"),
    pytest.param(
        {"bits": torch.int8}, TypeError, ["`bits`=torch.int8", "dtype", "'ternary', 2, 3, 4"], id="bits-dtype"
    ),
    pytest.param({"bits": None}, TypeError, ["`bits`=None", "'ternary', 2, 3, 4, 8"], id="bits-none"),
    pytest.param({"group_size": 0}, ValueError, ["`group_size`=0", "at least 1"], id="group-size"),
    pytest.param({"group_size": "row"}, TypeError, ["`group_size`='row'", '"tensor"'], id="group-size-text"),
    pytest.param({"symmetric": 0}, TypeError, ["`symmetric`=0", "True, False or None"], id="symmetric"),
    pytest.param({"activations": torch.int8}, ValueError, ["`activations`", "['float', 'int8']"], id="activations"),
    pytest.param({"method": "awq"}, ValueError, ["`method`='awq'", "['rtn', 'gptq']"], id="method"),
    pytest.param({"bits": float("nan")}, ValueError, ["`bits`=nan", "between 2 and 8"], id="bits-nan"),
    pytest.param({"bits": 1.5}, ValueError, ["`bits`=1.5", "between 2 and 8"], id="bits-small"),
    pytest.param({"budget": 0}, ValueError, ["`budget`=0", "positive"], id="budget-zero"),
    pytest.param({"budget": [1]}, TypeError, ["`budget`=[1]", "60MB"], id="budget-list"),
    pytest.param({"modules": ["up_proj"]}, TypeError, ["`modules`", "dict of name to Scheme", "list"], id="modules"),
    pytest.param({"modules": {"": Scheme()}}, TypeError, ["`modules`", "''", "names"], id="modules-empty-name"),
    pytest.param({"modules": {3: Scheme()}}, TypeError, ["`modules`", "key 3", "names"], id="modules-number"),
    pytest.param({"modules": {"up": 8}}, TypeError, ["`modules['up']`", "Scheme", "got 8"], id="modules-no-scheme"),
    pytest.param(
        {"modules": {"up": {"bits": 5}}}, ValueError, ["`modules['up']`", "`bits`=5"], id="modules-wrong-scheme"
    ),
    pytest.param({"modules": {"up": {"bit": 4}}}, TypeError, ["`modules['up']`", "'bit'"], id="modules-wrong-field"),
    pytest.param(
        {"modules": {"up": {"bits": 4, "shape": [4, -1]}}},
        ValueError,
        ["`modules['up']`", "[4, -1]"],
        id="shape-negative",
    ),
    pytest.param(
        {"modules": {"up": {"bits": 4, "shape": [4]}}},
        ValueError,
        ["`modules['up']`", "two or three"],
        id="shape-short",
    ),
    pytest.param(
        {"modules": {"up": {"bits": 4, "shape": "4x4"}}}, ValueError, ["`modules['up']`", "'4x4'"], id="shape-text"
    ),
    pytest.param(
        {"modules": {"up": {"bits": 4, "shape": [4, True]}}}, ValueError, ["`modules['up']`", "True"], id="shape-bool"
    ),
    pytest.param(
        {"modules_to_not_convert": "head"}, TypeError, ["`modules_to_not_convert`='head'", "list"], id="skip"
    ),
    pytest.param({"modules_to_not_convert": 5}, TypeError, ["`modules_to_not_convert`=5", "list"], id="skip-number"),
    pytest.param(
        {"modules_to_not_convert": [5]}, TypeError, ["`modules_to_not_convert`=[5]", "list"], id="skip-numbers"
    ),
    pytest.param({"modules_to_not_convert": [""]}, TypeError, ["`modules_to_not_convert`=['']"], id="skip-empty-name"),
    pytest.param(
        {"modules_to_not_convert": (n for n in ["a"])},
        TypeError,
        ["`modules_to_not_convert`", "list"],
        id="skip-generator",
    ),
    pytest.param({"dequantize": "yes"}, TypeError, ["`dequantize`='yes'", "True or False"], id="dequantize"),
]


@pytest.mark.parametrize(("fields", "error", "parts"), WRONG)
def test_a_wrong_value_is_named_with_what_is_allowed(fields, error, parts):
    with pytest.raises(error) as caught:
        LowBitConfig(**fields)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize("fields", [{"bits": 3.2}, {"bits": 4.0}, {"budget": "60MB"}, {"budget": 0.25}], ids=str)
def test_a_planned_size_is_kept_until_there_is_a_plan(fields):
    config = LowBitConfig(**fields)
    assert config.is_planned and not config.is_resolved
    assert LowBitConfig.from_dict(config.to_dict()) == config
    assert config.to_dict().items() >= fields.items()
    assert not LowBitConfig(bits=4).is_planned


@pytest.mark.parametrize("fields", [{"bits": 3, "budget": "60MB"}, {"bits": 4.0, "budget": "60MB"}], ids=str)
def test_bits_and_budget_both_say_how_large(fields):
    with pytest.raises(ValueError, match="both say how large"):
        LowBitConfig(**fields)


@pytest.mark.parametrize("kind", [DQTConfig, BlastConfig])
@pytest.mark.parametrize("field", ["budget", "calibration"])
def test_other_configs_have_no_plan_and_no_data(kind, field):
    with pytest.raises(TypeError, match=f"no field `{field}`"):
        kind(**{field: "60MB"})


def test_the_method_follows_the_data():
    assert LowBitConfig(calibration=["text"]).method == "gptq"
    assert LowBitConfig(bits=3.2, calibration=["text"]).method == "gptq"
    assert LowBitConfig(bits=3.2).method == "rtn"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # the plan uses the data, the rounding does not
        assert LowBitConfig(bits=3.2, method="rtn", calibration=["text"]).method == "rtn"


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        pytest.param("bit", "did you mean `bits`?", id="bit"),
        pytest.param("groupsize", "did you mean `group_size`?", id="groupsize"),
        pytest.param("modules_to_not_covert", "did you mean `modules_to_not_convert`?", id="typo"),
        pytest.param("symetric", "did you mean `symmetric`?", id="symetric"),
        pytest.param("colour", "the fields are ['bits', 'group_size'", id="nothing-close"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest(name, suggestion):
    with pytest.raises(TypeError) as caught:
        LowBitConfig(**{name: 1})
    assert f"no field `{name}`" in str(caught.value)
    assert suggestion in str(caught.value)


def test_dtypes_of_other_configs_are_unknown_fields():
    with pytest.raises(TypeError, match="no field `compute_dtype`"):
        LowBitConfig(compute_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        pytest.param(2, r"`format_version`=2 is newer than 1.*upgrade hf_lowbit", id="newer"),
        pytest.param(0, r"`format_version`=0 is not a format version", id="zero"),
        pytest.param("1", r"`format_version`='1' is not a format version", id="text"),
        pytest.param(1.0, r"`format_version`=1.0 is not a format version", id="float"),
        pytest.param(True, r"`format_version`=True is not a format version", id="bool"),
        pytest.param(None, r"`format_version`=None is not a format version", id="none"),
        pytest.param([1], r"`format_version`=\[1\] is not a format version", id="list"),
    ],
)
def test_a_format_version_that_is_not_ours_is_refused(version, message):
    with pytest.raises(ValueError, match=message):
        LowBitConfig(format_version=version)


def test_another_quant_method_is_refused():
    with pytest.raises(ValueError, match="`quant_method`='gptq' is not 'hf_lowbit'"):
        LowBitConfig.from_dict({"quant_method": "gptq", "bits": 4})


def test_calibration_that_is_not_used_warns():
    with pytest.warns(UserWarning, match="`calibration` is not used"):
        LowBitConfig(method="rtn", calibration=["text"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LowBitConfig()


def test_modules_take_schemes_and_dicts():
    config = LowBitConfig(modules={"up": Scheme(8), "re:layers\\.0.*": {"bits": "ternary", "group_size": None}})
    assert config.modules == {"up": Scheme(8), "re:layers\\.0.*": Scheme("ternary", None)}
    assert config.shapes == {} and not config.is_resolved


def test_modules_with_shapes_are_a_record():
    config = LowBitConfig(modules={"up": {"bits": 4, "shape": [6, 8]}})
    assert config.is_resolved
    assert config.shapes == {"up": (6, 8)}


def test_the_arguments_stay_the_callers():
    modules = {"up": {"bits": 4, "shape": [6, 8]}}
    skipped = ["head"]
    config = LowBitConfig(modules=modules, modules_to_not_convert=skipped)
    config.modules["down"] = Scheme(8)
    config.modules_to_not_convert.append("up")
    assert modules == {"up": {"bits": 4, "shape": [6, 8]}}
    assert skipped == ["head"]


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset])
def test_skipped_names_come_in_any_collection(kind):
    assert sorted(LowBitConfig(modules_to_not_convert=kind(["b", "a"])).modules_to_not_convert) == ["a", "b"]


def test_skipped_names_keep_the_order_they_have():
    assert LowBitConfig(modules_to_not_convert=["b", "a"]).modules_to_not_convert == ["b", "a"]
    assert LowBitConfig(modules_to_not_convert={"b", "a"}).modules_to_not_convert == ["a", "b"]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(LowBitConfig(bits=8), id="bits"),
        pytest.param(LowBitConfig(group_size=64), id="group-size"),
        pytest.param(LowBitConfig(symmetric=False), id="symmetric"),
        pytest.param(LowBitConfig(activations="int8"), id="activations"),
        pytest.param(LowBitConfig(modules={"up": Scheme(8)}), id="modules"),
        pytest.param(LowBitConfig(modules_to_not_convert=["up"]), id="skip"),
        pytest.param(LowBitConfig(dequantize=True), id="dequantize"),
        pytest.param(LowBitConfig().to_dict(), id="its-dict"),
        pytest.param(None, id="none"),
    ],
)
def test_equality_sees_every_field(other):
    assert LowBitConfig() != other
    assert LowBitConfig() == LowBitConfig(bits=4, group_size=128, symmetric=True, activations="float")


def test_a_config_that_can_change_is_not_hashable():
    with pytest.raises(TypeError, match="unhashable"):
        hash(LowBitConfig())


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LowBitConfig(), id="default"),
        pytest.param(LowBitConfig("ternary", None, modules_to_not_convert=["re:.*1"]), id="skip"),
        pytest.param(LowBitConfig(modules={"up": {"bits": 3, "shape": [2, 3]}}, dequantize=True), id="resolved"),
    ],
)
def test_copies_are_equal_and_independent(config):
    before = config.to_dict()
    for clone in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(clone) is LowBitConfig and clone == config
        clone.modules["new"] = Scheme(8)
        clone.modules_to_not_convert.append("new")
        assert config.to_dict() == before


def test_conflict_names_what_differs_and_the_way_out():
    stored = LowBitConfig(bits=4, group_size=64, modules={"up": {"bits": 4, "shape": [2, 2]}})
    for name, value in LowBitConfig(bits=8, group_size=64).get_loading_attributes().items():
        setattr(stored, name, value)
    message = stored.conflict()
    assert "`bits`=4" in message and "`bits`=8" in message
    assert "`group_size`" not in message
    assert "dequantize=True" in message


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(LowBitConfig(bits=4, group_size=64), id="the-same"),
        pytest.param(LowBitConfig(bits=8, dequantize=True), id="dequantize"),
    ],
)
def test_no_conflict(request_):
    stored = LowBitConfig(bits=4, group_size=64)
    assert stored.conflict() is None
    for name, value in request_.get_loading_attributes().items():
        setattr(stored, name, value)
    assert stored.conflict() is None


def test_a_dict_in_modules_takes_the_group_size_of_the_config():
    config = LowBitConfig(bits=4, group_size=32, modules={"up_proj": {"bits": 8}, "down_proj": Scheme(8)})
    assert [config.modules[name].group_size for name in ("up_proj", "down_proj")] == [32, 128]


def test_from_dict_checks_what_it_overrides():
    saved = LowBitConfig(bits=4).to_dict()
    assert LowBitConfig.from_dict(saved, bits=8).bits == 8
    with pytest.raises(ValueError, match="`bits`=5"):
        LowBitConfig.from_dict(saved, bits=5)
    assert LowBitConfig.from_dict(saved, return_unused_kwargs=True, foo=1)[1] == {"foo": 1}
