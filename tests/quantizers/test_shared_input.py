"""Layers of real architectures that share the preparation of their input: who they are, that nothing else changes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.kernels import separate_products
from hf_lowbit.kernels.cpu import library
from hf_lowbit.nn import linear
from hf_lowbit.nn.sharing import FEWEST_ROWS, TRIES
from tests.quantizers.architectures import BY_ID


pytestmark = pytest.mark.skipif(library.load().handle is None, reason="only kernels of the C library share")
# what the first layers of a model prepare together, by the last part of their names
SHARED = {
    "llama": {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")},
    "qwen2": {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")},
    "phi3": set(),
    "gpt2": set(),
    "mixtral": {("q_proj", "k_proj", "v_proj")},
    "opt": {("q_proj", "k_proj", "v_proj")},
    "t5-relu": {("q", "k", "v"), ("k", "v")},
    "t5-gated": {("q", "k", "v"), ("k", "v"), ("wi_0", "wi_1")},
    "bart": {("q_proj", "k_proj", "v_proj"), ("k_proj", "v_proj")},
    "whisper": {("q_proj", "k_proj", "v_proj"), ("k_proj", "v_proj")},
    "bert-classifier": {("query", "key", "value")},
    "distilbert": {("q_lin", "k_lin", "v_lin")},
    "vit": {("query", "key", "value"), ("q_proj", "k_proj", "v_proj")},
}


@pytest.fixture(autouse=True)
def any_number_of_rows(monkeypatch, request):
    """The inputs of the zoo are short."""
    if "rows" not in request.fixturenames:
        monkeypatch.setattr(linear, "FEWEST_ROWS", 1)


def compute(architecture, model):
    with torch.no_grad():
        return getattr(model(**architecture.inputs), architecture.output)


def heads(model):
    """The groups of a model, by the last parts of their names in the order of the model's calls."""
    names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    links = [(name, module.__dict__.get("sharing")) for name, module in model.named_modules()]
    return {
        (name.rpartition(".")[2], *(names[id(reference())] for reference, _ in link.followers))
        for name, link in links
        if link is not None and link.followers
    }


@pytest.mark.parametrize("fields", [{"bits": 4, "group_size": 32}, {"bits": "ternary"}], ids=["int4", "ternary"])
@pytest.mark.parametrize("name", SHARED)
def test_every_architecture_computes_the_same(name, fields):
    architecture = BY_ID[name]
    model = lb.quantize(architecture.build(), lb.LowBitConfig(**fields))
    with separate_products():
        expected = compute(architecture, model)
    for _ in range(3):
        assert torch.equal(compute(architecture, model), expected)
    found = heads(model)
    assert found <= SHARED[name] and bool(found) == bool(SHARED[name])


@pytest.mark.parametrize("name", ["llama", "t5-gated", "mixtral", "whisper"])
def test_generation_gives_the_same_tokens(name):
    architecture = BY_ID[name]
    model = lb.quantize(architecture.build(), lb.LowBitConfig(bits=4, group_size=32))
    with separate_products():
        expected = architecture.generate(model)
    assert torch.equal(architecture.generate(model), expected)
    assert torch.equal(architecture.generate(model), expected)
    assert heads(model)


@pytest.mark.parametrize("rows", [1, FEWEST_ROWS - 1, FEWEST_ROWS, 17, 512])
def test_prompts_of_any_length(rows):
    model = lb.quantize(BY_ID["llama"].build(), lb.LowBitConfig(bits=4, group_size=32, activations="int8"))
    ids = torch.arange(rows).remainder(60).view(1, rows)
    with torch.no_grad():
        for _ in range(2):
            model(ids)
        logits = model(ids).logits
        with separate_products():
            assert torch.equal(model(ids).logits, logits)


def test_a_saved_model_is_an_ordinary_one(tmp_path):
    architecture = BY_ID["llama"]
    model = lb.quantize(architecture.build(), lb.LowBitConfig(bits=4, group_size=32))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(TRIES):
        compute(architecture, model)
    assert heads(model)
    after = model.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(compute(architecture, again), compute(architecture, model))
    weights = [tensor.data_ptr() for name, tensor in after.items()]
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == weights


def test_no_second_copy_of_a_weight():
    """All tensors alive that are as large as a weight are the model's own."""
    import gc

    architecture = BY_ID["llama"]
    model = lb.quantize(architecture.build(), lb.LowBitConfig(bits=4, group_size=32))
    gc.collect()
    before = sum(isinstance(o, torch.Tensor) and o.dtype == torch.int8 for o in gc.get_objects())
    for _ in range(TRIES):
        compute(architecture, model)
    gc.collect()
    assert heads(model)
    assert sum(isinstance(o, torch.Tensor) and o.dtype == torch.int8 for o in gc.get_objects()) == before


def test_adapters_on_some_of_them():
    peft = pytest.importorskip("peft")
    architecture = BY_ID["llama"]
    model = lb.quantize(architecture.build(), lb.LowBitConfig(bits=4, group_size=32))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config).eval()
    with separate_products():
        expected = compute(architecture, model)
        with model.disable_adapter():
            without = compute(architecture, model)
    for _ in range(3):
        assert torch.equal(compute(architecture, model), expected)
    with model.disable_adapter():
        assert torch.equal(compute(architecture, model), without)
    assert not torch.equal(expected, without)
    assert heads(model.get_base_model())
    # training sees layers that compute for themselves
    model.train()(**architecture.inputs).logits.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_B" in n)


def test_trained_layers_compute_for_themselves():
    architecture = BY_ID["llama"]
    model = lb.quantize(architecture.build(), lb.LowBitConfig(bits=8, group_size=None))
    for _ in range(TRIES):
        compute(architecture, model)
    assert heads(model)
    lb.quantize(model, lb.DQTConfig(bits=8, group_size=None)).eval()
    trained = compute(architecture, model)
    with separate_products():
        assert torch.equal(compute(architecture, model), trained)
    lb.freeze(model)
    for _ in range(TRIES):
        assert torch.equal(compute(architecture, model), trained)
