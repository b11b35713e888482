"""torch.compile without a graph break, and generation with a cache of fixed size.

Public reports: huggingface/optimum-quanto#221, dropbox/hqq#64, pytorch/ao#1600, NVIDIA/TransformerEngine#705.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_lowbit as lb
from tests.quantizers.architectures import BY_ID, DECODER, IDS


# inductor fuses and reorders float32 sums
SAME_NUMBERS = 1e-5
TABLE = {"modules": {"embed_tokens": lb.Scheme(8, 32)}}
VARIANTS = [
    pytest.param("llama", {"bits": 4, "group_size": 32}, id="llama"),
    pytest.param("llama-tied", {"bits": 3, "group_size": 32, **TABLE}, id="llama-low-bit-table"),
    pytest.param("gemma", {"bits": 2, "group_size": None, **TABLE}, id="gemma-scaled-table"),
    pytest.param("gpt2", {"bits": "ternary", "group_size": "tensor"}, id="gpt2-int8-activations"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_one_graph_without_breaks(name, fields, lowbit_folder):
    model = AutoModelForCausalLM.from_pretrained(lowbit_folder(name, **fields))
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        actual = compiled(input_ids=IDS, use_cache=False).logits
    assert (actual - expected).norm() <= SAME_NUMBERS * expected.norm()


def test_inductor():
    # one layer: compiling takes its time for each
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**DECODER, "num_hidden_layers": 1})).eval()
    lb.quantize(model, lb.LowBitConfig(bits=4, group_size=32))
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
        actual = torch.compile(model, fullgraph=True)(input_ids=IDS, use_cache=False).logits
    assert (actual - expected).norm() <= SAME_NUMBERS * expected.norm()


def test_compiled_backward_reaches_the_inputs(lowbit_folder):
    """What an adapter or a frozen teacher needs: gradients through low-bit layers."""
    model = AutoModelForCausalLM.from_pretrained(lowbit_folder("llama", bits=4, group_size=32))
    inputs = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(0))

    def gradient(forward):
        x = inputs.clone().requires_grad_()
        forward(inputs_embeds=x, use_cache=False).logits.square().sum().backward()
        return x.grad

    expected = gradient(model)
    actual = gradient(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert expected.norm() > 0
    assert (actual - expected).norm() <= SAME_NUMBERS * expected.norm()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_generate_with_a_static_cache(name, lowbit_folder):
    model = AutoModelForCausalLM.from_pretrained(lowbit_folder(name, bits=4, group_size=32))
    assert model.hf_quantizer.is_compileable
    plain = BY_ID[name].generate(model)
    static = model.generate(input_ids=IDS, max_new_tokens=5, do_sample=False, cache_implementation="static")
    assert torch.equal(static, plain)
