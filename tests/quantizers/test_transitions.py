"""Low-bit and trainable checkpoints are one kind: every way from one to the other, and what is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.nn.arming import trainable_modules
from hf_lowbit.nn.packed import LowBitModule
from tests.quantizers.architectures import BY_ID, IDS


DQT = [
    pytest.param({"bits": 8}, id="8"),
    pytest.param({"bits": 8, "forward_bits": "ternary"}, id="8-ternary-forward"),
    pytest.param({"bits": 4, "group_size": 32}, id="4"),
    pytest.param({"bits": 3}, id="3"),
    pytest.param({"bits": "ternary", "scale": "learned"}, id="ternary"),
]


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


@pytest.fixture(scope="module")
def trainable_folder(dense_folder, tmp_path_factory):
    """Fields of a DQTConfig -> folder of a trainable checkpoint, and its logits."""
    made = {}

    def folder(**fields):
        key = str(sorted(fields.items(), key=str))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("trainable")
            load(dense_folder("llama"), quantization_config=lb.DQTConfig(**fields)).save_pretrained(made[key])
        return made[key]

    return folder


@pytest.mark.parametrize("fields", DQT)
def test_dense_checkpoint_becomes_trainable(fields, dense_folder):
    model = load(dense_folder("llama"), quantization_config=lb.DQTConfig(**fields))
    names = [name for name, _ in trainable_modules(model)]
    assert len(names) == 14 and model.hf_quantizer.is_qat_trainable
    memory = lb.quantize(BY_ID["llama"].build(), lb.DQTConfig(**fields))
    assert torch.equal(logits(model), logits(memory))
    as_dict = load(dense_folder("llama"), quantization_config=lb.DQTConfig(**fields).to_dict())
    assert torch.equal(logits(model), logits(as_dict))


@pytest.mark.parametrize("fields", DQT)
def test_trainable_checkpoint_loads_trainable_and_for_inference(fields, trainable_folder):
    folder = trainable_folder(**fields)
    model = load(folder)
    assert len(list(trainable_modules(model))) == 14
    assert all(m.weight.requires_grad for _, m in trainable_modules(model))
    assert model.config.quantization_config == lb.DQTConfig.from_dict(model.config.quantization_config.to_dict())
    again = load(folder, quantization_config=lb.DQTConfig(**fields))
    assert torch.equal(logits(model), logits(again))
    assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape == (2, 10)


@pytest.mark.parametrize("fields", DQT)
def test_trainable_checkpoint_loads_frozen_when_asked_for_its_forward_pass(fields, trainable_folder, tmp_path):
    folder = trainable_folder(**fields)
    forward = lb.DQTConfig(**fields).frozen()
    asked = lb.LowBitConfig(bits=forward.bits, group_size=forward.group_size, symmetric=True)
    model = load(folder, quantization_config=asked)
    assert not list(trainable_modules(model)) and any(isinstance(m, LowBitModule) for m in model.modules())
    assert torch.equal(logits(model), logits(load(folder)))
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config.quantization_config.training is None
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("fields", DQT)
def test_freeze_and_train_again(fields, trainable_folder, tmp_path):
    model = load(trainable_folder(**fields))
    expected = logits(model)
    frozen = lb.freeze(model)
    assert frozen is model and torch.equal(logits(frozen), expected)
    assert not model.hf_quantizer.is_qat_trainable
    frozen.save_pretrained(tmp_path)
    forward = lb.DQTConfig(**fields).frozen()
    more = lb.DQTConfig(bits=forward.bits, group_size=forward.group_size)
    in_memory = lb.quantize(load(tmp_path), more)
    at_load = load(tmp_path, quantization_config=more)
    for again in (in_memory, at_load):
        assert len(list(trainable_modules(again))) == 14
        assert torch.equal(logits(again), expected)
        again.train()
        again(input_ids=IDS, labels=IDS).loss.backward()


def test_low_bit_checkpoint_with_zero_points_becomes_trainable(lowbit_folder):
    """2 and 3 bits have zero points by default: they stay where they are, and codes move."""
    folder = lowbit_folder("llama", bits=3, group_size=32)
    model = load(folder, quantization_config=lb.DQTConfig(bits=3, group_size=32))
    assert torch.equal(logits(model), logits(load(folder)))
    optimizer = lb.DQTOptimizer(model, lr=1e-2, weight_decay=0.01)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert sum(moved.changed for moved in optimizer.last_step.moved.values()) > 0
    assert torch.equal(logits(lb.freeze(model)), logits(model))


def test_low_bit_embedding_stays_frozen_beside_trainable_layers(dense_folder, tmp_path):
    modules = {"embed_tokens": lb.Scheme(bits=8, group_size=None)}
    config = lb.LowBitConfig(bits=8, group_size=None, modules=modules)
    load(dense_folder("llama"), quantization_config=config).save_pretrained(tmp_path)
    model = load(tmp_path, quantization_config=lb.DQTConfig(bits=8))
    assert len(list(trainable_modules(model))) == 14
    assert not model.model.embed_tokens.weight.requires_grad


@pytest.mark.parametrize("fields", DQT)
def test_dequantize(fields, trainable_folder, tmp_path):
    model = load(trainable_folder(**fields))
    names = [name for name, _ in trainable_modules(model)]
    weights = {name: m.dense_weight() for name, m in trainable_modules(model)}
    dense = model.dequantize()
    assert all(torch.equal(dense.get_submodule(name).weight, weights[name]) for name in names)
    assert all(type(dense.get_submodule(name)) is torch.nn.Linear for name in names)
    dense.save_pretrained(tmp_path)
    assert getattr(load(tmp_path).config, "quantization_config", None) is None
    for config in (lb.LowBitConfig(dequantize=True), lb.DQTConfig(dequantize=True)):
        at_load = load(trainable_folder(**fields), quantization_config=config)
        assert torch.equal(at_load.get_submodule(names[0]).weight, weights[names[0]])


@pytest.mark.parametrize(
    ("stored", "asked", "match"),
    [
        pytest.param({"bits": 8}, lb.DQTConfig(bits=4), "`bits`=8", id="bits"),
        pytest.param({"bits": 8}, lb.DQTConfig(bits=8, group_size=32), "`group_size`=None", id="groups"),
        pytest.param({"bits": 8}, lb.DQTConfig(8, forward_bits="ternary"), "`forward_bits`=None", id="forward"),
        pytest.param(
            {"bits": 8, "forward_bits": "ternary"},
            lb.LowBitConfig(8, group_size=None),
            "`bits`='ternary'",
            id="frozen",
        ),
    ],
)
def test_conflicts_are_refused_with_both_values(stored, asked, match, trainable_folder):
    with pytest.raises(ValueError, match=match):
        load(trainable_folder(**stored), quantization_config=asked)


def test_low_bit_checkpoint_of_other_bits_is_refused(lowbit_folder):
    with pytest.raises(ValueError, match="`bits`=4"):
        load(lowbit_folder("llama", bits=4, group_size=32), quantization_config=lb.DQTConfig(bits=8))


def test_quantize_refuses_what_is_trainable_already_or_of_other_bits():
    model = lb.quantize(BY_ID["llama"].build(), lb.DQTConfig(bits=8))
    with pytest.raises(ValueError, match="freeze"):
        lb.quantize(model, lb.DQTConfig(bits=8))
    with pytest.raises(ValueError, match="already low-bit"):
        lb.quantize(model, lb.LowBitConfig(bits=8))
    with pytest.raises(ValueError, match="`bits`=8"):
        lb.quantize(lb.freeze(model), lb.DQTConfig(bits=4))


def test_freeze_refuses_what_has_nothing_to_freeze():
    with pytest.raises(ValueError, match="no trainable low-bit weight"):
        lb.freeze(BY_ID["llama"].build())
    with pytest.raises(TypeError, match="torch module"):
        lb.freeze("model")


@pytest.mark.parametrize(
    "name", ["llama-tied", "gpt2", "qwen2", "bart", "bert-classifier", "vit", "mixtral", "t5-gated"]
)
def test_architectures(name, dense_folder, tmp_path):
    """Linear layers become trainable; tables, heads, routers and experts stay as they are."""
    architecture = BY_ID[name]
    model = architecture.auto.from_pretrained(dense_folder(name), quantization_config=lb.DQTConfig(bits=8))
    names = [n for n, _ in trainable_modules(model)]
    assert names and not any(part in n for n in names for part in ("lm_head", "classifier", "embed", "experts"))
    assert model.num_parameters() == architecture.build().num_parameters()
    trainable = model.num_parameters(only_trainable=True)
    assert trainable == architecture.build().num_parameters(only_trainable=True)
    expected = architecture(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(architecture(architecture.auto.from_pretrained(tmp_path)), expected)
    assert torch.equal(architecture(lb.freeze(model)), expected)


def test_report_of_a_trainable_model():
    model = lb.quantize(BY_ID["llama"].build(), lb.DQTConfig(bits=8, forward_bits="ternary"))
    report = lb.report(model)
    rows = [row for row in report.modules if row.scheme is not None]
    assert len(rows) == 14 and all("trained directly" in row.reason for row in rows)
    assert report.total_parameters == BY_ID["llama"].build().num_parameters()
    stored = sum(m.stored().numel() + 4 * m.weight_scale.numel() for _, m in trainable_modules(model))
    assert report.lowbit_bytes == stored
    actual = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    assert model.get_memory_footprint() - actual == sum(b.numel() * b.element_size() for b in model.buffers())


def test_card_of_a_trainable_checkpoint(trainable_folder):
    from hf_lowbit.hub.card import render_card
    from hf_lowbit.hub.facts import from_checkpoint

    folder = trainable_folder(bits=8, forward_bits="ternary")
    assert from_checkpoint(folder).bits == [8]
    card = str(render_card(folder, online=False))
    assert "the codes themselves are trained" in card and "their ternary form" in card


def test_where_codes_came_from_is_read_back_and_checked():
    config = lb.DQTConfig(bits=8).frozen()
    assert config.origin == "dqt"
    assert lb.LowBitConfig.from_dict(config.to_dict()) == config
    assert "origin" not in lb.LowBitConfig().to_dict()
    with pytest.raises(ValueError, match="`origin`='magic'"):
        lb.LowBitConfig(origin="magic")
