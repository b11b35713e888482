"""Layers of other libraries: those that need torch alone run, the rest is left out with a sentence, wrong ones too."""

import pytest
import torch

from benchmarks import linear
from benchmarks.peers import products
from benchmarks.record import Record
from hf_lowbit.kernels.torch_native.int4 import HAS_INT4


SHAPE = (64, 128)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.skipif(not HAS_INT4, reason="torch has no fast int4 product on this processor")
def test_those_of_torch_are_products():
    for make in (products.aten_int4, products.aten_int8):
        assert products.obstacle(make, SHAPE) is None
        assert make(products.dense_layer(SHAPE))(torch.randn(3, 128).bfloat16()).shape == (3, 64)


def test_what_is_not_installed_or_wrong_is_left_out_with_a_sentence(monkeypatch):
    def missing(layer):
        import no_such_library  # noqa: F401

    def wrong(layer):
        return lambda x: torch.randn(x.shape[0], layer.out_features)

    def doubled(layer):
        return lambda x: 2 * layer(x)

    monkeypatch.setattr(products, "PEERS", {"missing": missing, "wrong": wrong, "doubled": doubled})
    found, left_out = products.candidates(SHAPE, 2)
    assert list(found) == ["doubled"]
    assert found["doubled"](torch.ones(1, 128).bfloat16(), 1).shape == (1, 64)
    assert "no_such_library" in left_out["missing"] and "off by" in left_out["wrong"]


def test_they_are_timed_in_our_loop(monkeypatch, tmp_path):
    monkeypatch.setattr(products, "PEERS", {"dense": lambda layer: layer, "gone": lambda layer: {}["gone"]})
    monkeypatch.setattr(linear, "ROWS", (1,))
    monkeypatch.setattr(linear, "BUDGET", 0.0)
    monkeypatch.setattr(linear, "stream_gb_per_s", lambda: 10.0)
    monkeypatch.setattr(linear, "is_quiet", lambda others, stream: True)
    record = Record("linear-peers", {}, folder=tmp_path)
    linear.measure(record, "torch-native", (32, 64), 4096, products.candidates)
    (row,) = record.rows.values()
    assert row["products"]["dense"]["us"] > 0 and "gone" in row["left_out"]
