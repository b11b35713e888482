"""Low-bit linear, Conv1D and embedding layers: what the dense layer with the dequantized weight computes."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import hf_lowbit as lb
from hf_lowbit.nn.embedding import LowBitEmbedding
from hf_lowbit.nn.linear import FlatLinear, LowBitConv1D, LowBitLinear
from tests.nn.models import Layers, by_reference, converted, random


# sums of ten products in another order
LAST_BITS = 1e-6
SCHEMES = [
    pytest.param("ternary", "tensor", id="ternary-tensor"),
    pytest.param(2, 4, id="2-bits-groups"),
    pytest.param(3, None, id="3-bits-channel"),
    pytest.param(4, 64, id="4-bits-one-group"),
    pytest.param(8, 4, id="8-bits-groups"),
]


@pytest.mark.parametrize(("bits", "group_size"), SCHEMES)
def test_each_kind_is_its_dense_layer_with_the_numbers_of_its_codes(bits, group_size):
    dense, low = Layers(), converted(Layers(), bits, group_size)
    assert [type(m) for m in low.children()] == [LowBitLinear, LowBitConv1D, LowBitEmbedding]
    with torch.no_grad():
        for name, module in low.named_children():
            getattr(dense, name).weight.copy_(module.dense_weight())
    x, ids = random(2, 3, 10), torch.tensor([[0, 11, 1], [1, 5, 5]])
    assert torch.allclose(by_reference(low.linear, x), by_reference(dense.linear, x), atol=LAST_BITS)
    assert torch.allclose(by_reference(low.conv1d, x), by_reference(dense.conv1d, x), atol=LAST_BITS)
    assert torch.equal(low.embedding(ids), dense.embedding(ids))


def test_they_are_the_classes_others_look_for():
    low = converted(Layers())
    assert isinstance(low.linear, nn.Linear) and isinstance(low.conv1d, Conv1D)
    assert isinstance(low.embedding, nn.Embedding)
    assert (low.linear.in_features, low.linear.out_features) == (10, 6)
    assert (low.conv1d.nx, low.conv1d.nf) == (10, 6)
    assert (low.embedding.num_embeddings, low.embedding.embedding_dim, low.embedding.padding_idx) == (12, 10, 1)


def test_the_bias_is_bit_equal_and_an_absent_one_stays_absent():
    dense, low = Layers(), converted(Layers())
    assert torch.equal(low.linear.bias, dense.linear.bias) and low.linear.bias.requires_grad
    assert torch.equal(low.conv1d.bias, dense.conv1d.bias)
    without = converted(Layers(bias=False)).linear
    assert without.bias is None and "bias" not in without.state_dict()


def test_conv1d_groups_run_along_its_input():
    """Weight [K, N]: the same codes as the linear layer with the transposed weight."""
    model = nn.ModuleDict({"linear": nn.Linear(10, 6), "conv1d": Conv1D(6, 10)})
    with torch.no_grad():
        model["conv1d"].weight.copy_(model["linear"].weight.t())
    low = converted(model, 4, 4)
    assert low["conv1d"].weight.shape == low["linear"].weight.shape == (1, 6, 5)
    assert torch.equal(low["conv1d"].weight, low["linear"].weight)
    assert torch.equal(low["conv1d"].weight_scale, low["linear"].weight_scale)
    assert low["conv1d"].dense_weight().shape == (10, 6)
    assert low["conv1d"].dense_weight().is_contiguous()


def test_int8_activations_are_the_schemes():
    x = random(3, 10)
    weight_only = converted(Layers(), 4, 4, activations="float").linear
    both = converted(Layers(), 4, 4, activations="int8").linear
    assert torch.equal(weight_only.weight, both.weight)
    difference = by_reference(weight_only, x) - by_reference(both, x)
    # a 127th of the largest activation at most, times weights below 1
    assert 0 < float(difference.abs().max()) < 10 * float(x.abs().max()) / 127


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_gradients_reach_input_and_bias(kind):
    dense, low = Layers(), getattr(converted(Layers(), 8, None), kind)
    reference = getattr(dense, kind)
    with torch.no_grad():
        reference.weight.copy_(low.dense_weight())
    gradients = []
    for layer in (low, reference):
        x = random(3, 10).requires_grad_()
        layer(x).square().sum().backward()
        gradients.append((x.grad, layer.bias.grad))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*gradients, strict=True))
    assert low.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_an_embedding_follows_the_models_dtype(dtype):
    low = converted(Layers())
    before = low.embedding(torch.tensor([3]))
    low.to(dtype)
    assert low.embedding(torch.tensor([3])).dtype == dtype
    assert torch.equal(low.embedding(torch.tensor([3])), before.to(dtype))
    assert "output_like" not in low.embedding.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_the_dtype_of_autocast(dtype):
    low, dense = converted(Layers().to(dtype)), Layers().to(dtype)
    x = random(3, 10, dtype=dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert low.linear(x).dtype == dense.linear(x).dtype == torch.bfloat16


def test_a_forward_on_the_meta_device_has_the_right_shape():
    low = converted(Layers()).to("meta")
    assert low.linear(torch.empty(2, 3, 10, device="meta")).shape == (2, 3, 6)
    assert low.embedding(torch.zeros(2, 3, dtype=torch.long, device="meta")).shape == (2, 3, 10)


def test_printing_shows_the_scheme():
    low = converted(Layers(), 3, 4)
    assert "LowBitLinear(in_features=10, out_features=6, bias=True, bits=3, group_size=4" in repr(low)
    assert "LowBitEmbedding(12, 10, padding_idx=1, bits=3" in repr(low)


@pytest.mark.parametrize("shape", [(10,), (3, 10), (2, 3, 10), (0, 10)], ids=str)
def test_flat_linear_is_linear(shape):
    plain = Layers().linear
    flat = Layers().linear
    flat.__class__ = FlatLinear
    x = random(*shape)
    assert torch.equal(flat(x), plain(x))
    sliced = random(2, 5, 10)[:, -1:, :]
    assert torch.allclose(flat(sliced), plain(sliced), atol=LAST_BITS)


def test_layers_compile_without_a_graph_break():
    torch.compiler.reset()
    low = converted(Layers(), 4, 4)

    def run(ids):
        return low.conv1d(low.embedding(ids)) + low.linear(low.embedding(ids))

    ids = torch.tensor([[0, 3], [5, 11]])
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(ids), run(ids))
    torch.compiler.reset()


def test_a_config_serves_many_models_and_stays_as_it_is():
    config = lb.LowBitConfig(group_size=4, modules={"embedding": lb.Scheme(8)}, modules_to_not_convert=["conv1d"])
    before = config.to_dict()
    first, second = lb.quantize(Layers(), config), lb.quantize(Layers(), config)
    assert config.to_dict() == before and not config.is_resolved
    assert torch.equal(first.linear.weight, second.linear.weight)
    assert type(first.conv1d) is Conv1D
