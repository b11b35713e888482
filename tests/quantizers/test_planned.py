"""`LowBitConfig(bits=3.2)` and `LowBitConfig(budget=...)` in from_pretrained and `quantize`: the plan of `compress`,
saved as modules."""

import copy
import json

import pytest
import torch
from torch import nn

import hf_lowbit as lb
from hf_lowbit.compression.plan import plan
from hf_lowbit.nn.embedding import LowBitEmbedding
from tests.quantizers.architectures import BY_ID


ZOO = ["llama-tied", "gpt2", "mixtral", "t5-gated", "bert-masked-lm", "clip"]
AVERAGE, SHARE = 4.2, 0.35


def size(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def data_of(row):
    return [dict(row.inputs), {name: value.flip(0) for name, value in row.inputs.items()}]


def same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module", params=ZOO)
def dense(request, tmp_path_factory):
    """(row, folder of its dense checkpoint)"""
    row = BY_ID[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    row.build().save_pretrained(folder)
    return row, folder


@pytest.mark.parametrize(
    ("fields", "data"), [({"bits": AVERAGE}, False), ({"budget": SHARE}, True)], ids=["average", "budget-data"]
)
def test_at_load_in_memory_and_reloaded_it_is_the_same_plan(dense, fields, data, tmp_path, monkeypatch):
    row, folder = dense
    # pictures, sounds and seven tokens are few; that they are too few to be of use is tested elsewhere
    monkeypatch.setattr("hf_lowbit.compression.calibrate.LEAST_TOKENS", 4)
    given = {**fields, "calibration": data_of(row) if data else None}
    loaded = row.auto.from_pretrained(folder, quantization_config=lb.LowBitConfig(**given))
    memory = lb.quantize(row.auto.from_pretrained(folder), lb.LowBitConfig(**given))
    assert same(loaded, memory)
    config = loaded.config.quantization_config
    assert config.is_resolved and not config.is_planned and config.calibration is None
    assert config.method == ("gptq" if data else "rtn")
    if "budget" in fields:
        assert size(loaded) <= SHARE * size(row.build())
    else:
        assert lb.report(loaded).bits_per_weight <= AVERAGE
    loaded.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "budget" not in saved and "calibration" not in saved and saved["bits"] == 4
    again = row.auto.from_pretrained(tmp_path)
    assert torch.equal(row(again), row(loaded))
    assert torch.isfinite(row(again)).all()


LLAMA = BY_ID["llama-tied"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    LLAMA.build().save_pretrained(folder)
    return folder


def test_it_is_the_plan_of_compress(folder):
    config = lb.LowBitConfig(budget="30%")
    planned = lb.quantize(LLAMA.build(), config)
    assert same(planned, lb.compress(LLAMA.build(), budget="30%", stages=("layer",)).model)
    assert planned.config.quantization_config.modules.keys() >= {"model.embed_tokens", "lm_head"}
    assert config.modules == {} and config.budget == "30%", "the user's config stays theirs"


def test_more_data_than_none_gives_another_plan(monkeypatch):
    monkeypatch.setattr("hf_lowbit.compression.calibrate.LEAST_TOKENS", 4)
    rough = plan(LLAMA.build(), lb.LowBitConfig(bits=3.2), None)
    informed = plan(LLAMA.build(), lb.LowBitConfig(bits=3.2), data_of(LLAMA))
    assert rough.modules.keys() == informed.modules.keys() and rough.modules != informed.modules


@pytest.mark.parametrize(
    ("dtype", "place"), [(torch.float32, "auto"), (torch.bfloat16, None), (torch.float16, {"": "cpu"})], ids=str
)
def test_dtypes_and_device_maps(folder, dtype, place, monkeypatch):
    monkeypatch.setattr("hf_lowbit.compression.calibrate.LEAST_TOKENS", 4)
    config = lb.LowBitConfig(budget="40%", calibration=data_of(LLAMA))
    model = LLAMA.auto.from_pretrained(folder, dtype=dtype, device_map=place, quantization_config=config)
    assert model.dtype == dtype and torch.isfinite(LLAMA(model)).all()
    whole = sum(p.numel() for p in LLAMA.build().parameters()) * dtype.itemsize
    assert size(model) <= 0.4 * whole
    assert isinstance(model.model.embed_tokens, LowBitEmbedding)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_what_a_user_names_is_not_planned():
    wishes = {"lm_head": lb.Scheme(8, None), "mlp.up_proj": lb.Scheme("ternary", "tensor")}
    model = lb.quantize(
        LLAMA.build(), lb.LowBitConfig(bits=3.5, modules=wishes, modules_to_not_convert=["layers.0.self_attn"])
    )
    modules = model.config.quantization_config.modules
    assert {s.bits for n, s in modules.items() if n.endswith("up_proj")} == {"ternary"}
    assert modules["lm_head"] == modules["model.embed_tokens"] == wishes["lm_head"]
    assert not any(".0.self_attn" in name for name in modules)
    planned = [n for n in modules if not n.endswith(("up_proj", "lm_head", "embed_tokens"))]
    rows = {m.name.removesuffix(".weight"): m for m in lb.report(model).modules}
    assert 8 * sum(rows[n].bytes for n in planned) <= 3.5 * sum(rows[n].parameters for n in planned)


def test_symmetry_activations_and_groups_are_kept():
    config = lb.LowBitConfig(bits=4.0, symmetric=True, activations="int8", group_size=48)
    model = lb.quantize(BY_ID["llama"].build(), config)
    schemes = model.config.quantization_config.modules.values()
    assert {s.symmetric for s in schemes} == {True} and {s.activations for s in schemes} == {"int8"}
    # 64 inputs have no groups of 48
    assert {s.group_size for s in schemes if s.bits != 8} == {32}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 2.05}, r"`bits`=2.05 is impossible: with scales in groups of 32 the smallest plan has 2\.\d\d bits"),
        ({"budget": "1kB"}, r"`budget`='1kB' is impossible: the smallest plan takes [\d,]+ bytes of the dense"),
        ({"budget": 0.01}, "`budget`=0.01 is impossible"),
        ({"bits": 3.2, "modules_to_not_convert": ["layers"]}, "nothing of LlamaForCausalLM would be converted"),
        ({"bits": 3.2, "modules": {"layers": lb.Scheme(4, 32)}}, "nothing is left to plan"),
        ({"bits": 3.2, "modules": {"nowhere": lb.Scheme(4, 32)}}, "matches no module"),
        ({"bits": 3.2, "method": "gptq"}, "needs `calibration`"),
        ({"budget": "30%", "calibration": []}, "empty"),
    ],
    ids=str,
)
def test_what_is_impossible_is_refused_before_a_weight_is_read(folder, fields, message, monkeypatch):
    model, before = LLAMA.build(), LLAMA.build()
    with pytest.raises(ValueError, match=message):
        lb.quantize(model, lb.LowBitConfig(**fields))
    assert same(model, before)
    monkeypatch.setattr("transformers.modeling_utils.PreTrainedModel._load_pretrained_model", None)
    with pytest.raises(ValueError, match=message):
        LLAMA.auto.from_pretrained(folder, quantization_config=lb.LowBitConfig(**fields))


def test_the_smallest_size_that_is_named_is_possible():
    with pytest.raises(ValueError, match="the smallest plan takes") as caught:
        lb.quantize(LLAMA.build(), lb.LowBitConfig(budget="1kB"))
    least = int(str(caught.value).partition("takes ")[2].partition(" bytes")[0].replace(",", ""))
    assert size(lb.quantize(LLAMA.build(), lb.LowBitConfig(budget=least))) == least
    with pytest.raises(ValueError, match="impossible"):
        lb.quantize(LLAMA.build(), lb.LowBitConfig(budget=least - 1))


def test_nan_in_a_weight_is_named_and_nothing_changes(monkeypatch):
    model = LLAMA.build()
    nn.init.constant_(model.model.layers[1].mlp.down_proj.weight, torch.nan)
    before = copy.deepcopy(model).state_dict()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj.*NaN"):
        lb.quantize(model, lb.LowBitConfig(bits=3.2))
    assert all(torch.equal(v.nan_to_num(), before[k].nan_to_num()) for k, v in model.state_dict().items())


def test_a_checkpoint_that_is_low_bit_has_no_second_plan(folder, tmp_path):
    lb.quantize(LLAMA.auto.from_pretrained(folder), lb.LowBitConfig(bits=3.2)).save_pretrained(tmp_path)
    for fields in ({"bits": 3.2}, {"budget": "30%"}):
        with pytest.raises(ValueError, match="a size is planned for dense weights only"):
            LLAMA.auto.from_pretrained(tmp_path, quantization_config=lb.LowBitConfig(**fields))


def test_a_dict_does(folder):
    given = {"quant_method": "hf_lowbit", "bits": 3.2}
    model = LLAMA.auto.from_pretrained(folder, quantization_config=given)
    assert same(model, lb.quantize(LLAMA.auto.from_pretrained(folder), {"bits": 3.2}))


def test_the_rest_of_a_sparse_model_is_not_planned():
    with pytest.raises(ValueError, match="`rest` is rounded when training has ended"):
        lb.BlastConfig(rest=lb.LowBitConfig(bits=3.2))
