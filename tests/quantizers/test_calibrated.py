"""`method="gptq"` through from_pretrained and quantize: the same model, saved and loaded, nearer to the dense one."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from benchmarks.perplexity import novel
from tests.assets import tiny_llama  # noqa: F401


TEXT = [novel("emma")[:30_000]]


def config(**fields):
    return lb.LowBitConfig(**{"bits": 3, "group_size": 32, "method": "gptq", "calibration": TEXT, **fields})


def logits(model):
    ids = torch.arange(64)[None] % 384
    with torch.inference_mode():
        return model(input_ids=ids).logits.float()


@pytest.fixture(scope="module")
def dense(tiny_llama):  # noqa: F811
    return AutoModelForCausalLM.from_pretrained(tiny_llama)


@pytest.fixture(scope="module")
def loaded(tiny_llama):  # noqa: F811
    return AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=config())


def test_in_memory_and_at_load_give_the_same(tiny_llama, loaded):  # noqa: F811
    given = config()
    model = lb.quantize(AutoModelForCausalLM.from_pretrained(tiny_llama), given)
    assert torch.equal(logits(model), logits(loaded))
    assert given.calibration is TEXT, "the user's config stays theirs"
    for found in (model, loaded):
        assert found.config.quantization_config.calibration is None
        assert {r.method for r in found.lowbit_records} == {"gptq"}


def test_a_generator_is_read_once_and_not_copied(tiny_llama, loaded):  # noqa: F811
    one_by_one = (text for text in TEXT)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=config(calibration=one_by_one))
    assert torch.equal(logits(model), logits(loaded))


def test_saved_and_loaded_it_is_the_same(loaded, tmp_path):
    loaded.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(loaded))
    assert again.config.quantization_config.method == "gptq"
    assert "calibration" not in (tmp_path / "config.json").read_text()


def test_it_is_another_model_than_rounding_with_the_same_modules(tiny_llama, loaded):  # noqa: F811
    rounded = AutoModelForCausalLM.from_pretrained(
        tiny_llama, quantization_config=lb.LowBitConfig(bits=3, group_size=32)
    )
    assert rounded.config.quantization_config.modules == loaded.config.quantization_config.modules
    assert not torch.equal(logits(rounded), logits(loaded))


def test_a_table_may_be_named_with_its_tied_head(tiny_llama, tmp_path):  # noqa: F811
    given = config(modules={"embed_tokens": lb.Scheme(8, 32)})
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=given)
    assert "without data" in next(r.note for r in model.lowbit_records if "embed" in r.name)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"calibration": None}, "needs `calibration`", id="none"),
        pytest.param({"calibration": []}, "empty", id="empty"),
        pytest.param({"calibration": ["a"]}, "tokens", id="one-token"),
    ],
)
def test_without_usable_data_it_is_refused_and_nothing_changes(tiny_llama, dense, fields, message):  # noqa: F811
    before = logits(dense)
    with pytest.raises(ValueError, match=message):
        lb.quantize(dense, config(**fields))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=config(**fields))
    assert torch.equal(before, logits(dense))
