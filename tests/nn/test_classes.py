"""Classes that stand in for dense ones: made once, found again by pickle, and reaching the right `super().forward`."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import hf_lowbit as lb
from hf_lowbit.nn.classes import dense_class, lowbit_class
from hf_lowbit.nn.embedding import LowBitEmbedding
from hf_lowbit.nn.linear import LowBitConv1D, LowBitLinear
from hf_lowbit.nn.packed import LowBitModule
from tests.nn.models import by_reference, converted, random
from tests.quantizers.architectures import BY_ID


class Scaled(nn.Linear):
    """A subclass that calls `super().forward`, with state of its own."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.factor = 3.0

    def forward(self, x):
        return self.factor * super().forward(x)


def test_plain_classes_have_fixed_partners():
    assert lowbit_class(nn.Linear, "linear", ("weight",)) is LowBitLinear
    assert lowbit_class(Conv1D, "conv1d", ("weight",)) is LowBitConv1D
    assert lowbit_class(nn.Embedding, "embedding", ("weight",)) is LowBitEmbedding


def test_a_subclass_gets_a_class_made_once():
    made = lowbit_class(Scaled, "linear", ("weight",))
    assert made is lowbit_class(Scaled, "linear", ("weight",))
    assert made.__name__ == "LowBitScaled" and issubclass(made, Scaled) and issubclass(made, LowBitLinear)


def test_super_reaches_the_packed_product():
    low, dense = converted(nn.Sequential(Scaled(10, 6)))[0], Scaled(10, 6)
    with torch.no_grad():
        dense.weight.copy_(low.dense_weight())
        dense.bias.copy_(low.bias)
    x = random(3, 10)
    assert torch.equal(by_reference(low, x), by_reference(dense, x))


@pytest.mark.parametrize("cls", [nn.Linear, Scaled])
def test_the_dense_class_is_remembered(cls):
    assert dense_class(converted(nn.Sequential(cls(10, 6)))[0]) is cls


def copies(model):
    """The model through every way of copying one."""
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    yield "deepcopy", copy.deepcopy(model)
    yield "pickle", pickle.loads(pickle.dumps(model))
    yield "torch.save", torch.load(saved, weights_only=False)


TABLES = {"gemma3": "model.embed_tokens", "bart": "model.shared", "llama-tied": "model.embed_tokens", "opt":
          "model.decoder.embed_tokens", "gpt2": "transformer.wte", "mixtral": None, "gpt-oss": None}  # fmt: skip


@pytest.mark.parametrize("row_id", TABLES)
def test_models_copy_with_their_tables_and_experts(row_id):
    """Gemma3 and BART scale their table in a subclass; OPT and BART shift positions in one."""
    row, table = BY_ID[row_id], TABLES[row_id]
    model = lb.quantize(row.build(), lb.LowBitConfig(4, 32, modules={table: lb.Scheme(8)} if table else None))
    expected = row(model)
    for way, clone in copies(model):
        assert [type(m) for m in clone.modules()] == [type(m) for m in model.modules()], way
        assert torch.equal(row(clone), expected), way
        for name, parameter in clone.named_parameters():
            assert parameter.data_ptr() != model.get_parameter(name).data_ptr(), (way, name)
        ties = {name: id(p) for name, p in clone.named_parameters(remove_duplicate=False)}
        before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        assert len(set(ties.values())) == len(set(before.values())), way


def test_a_changed_copy_leaves_the_original_alone():
    model = converted(nn.Sequential(nn.Linear(10, 6)))
    clone = copy.deepcopy(model)
    with torch.no_grad():
        clone[0].weight.zero_()
        clone[0].weight_scale.fill_(9)
    assert bool(model[0].weight.any()) and float(model[0].weight_scale.max()) < 9
    assert clone[0].lowbit == model[0].lowbit


def test_pickle_without_getstate(monkeypatch):
    """Python 3.10 has no `object.__getstate__`."""

    def without(self, name):
        if name == "__getstate__":
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    low = converted(nn.Sequential(Scaled(10, 6)))[0]
    monkeypatch.setattr(type(low), "__getattribute__", without, raising=False)
    clone = pickle.loads(pickle.dumps(low))
    assert torch.equal(clone.weight, low.weight) and clone.factor == 3.0


def test_gemma3s_table_scales_its_rows():
    row = BY_ID["gemma3"]
    dense = row.build()
    model = lb.quantize(row.build(), lb.LowBitConfig(modules={"model.embed_tokens": lb.Scheme(8, None)}))
    table = model.model.embed_tokens
    assert isinstance(table, LowBitModule) and isinstance(table, type(dense.model.embed_tokens))
    ids = torch.tensor([[3, 9]])
    expected = table.dense_weight()[ids] * 64**0.5
    assert torch.allclose(table(ids), expected, rtol=1e-6)
    # half a step of 8 bits, times the factor
    assert torch.allclose(table(ids), dense.model.embed_tokens(ids), atol=float(table.weight_scale.max()) * 8)
