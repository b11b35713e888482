"""The benchmark that trains from scratch: its BitNet is BitNet, its rounding to nearest rounds, its runs compare."""

import torch

import hf_lowbit as lb
from benchmarks import scratch_models as scratch
from hf_lowbit.functional.grid import grid_of
from hf_lowbit.functional.rounding import round_to_nearest
from hf_lowbit.training import leaves


def test_bitnet_multiplies_with_absmean_ternary_and_passes_gradients_on():
    model = scratch.build("0.3M", "bitnet", 0)
    layer = model.model.layers[0].mlp.up_proj
    master = layer.parametrizations.weight.original
    q = round_to_nearest(master, grid_of("ternary"), "tensor", symmetric=True)
    assert torch.allclose(layer.weight, q.codes.float() * q.scale, atol=1e-6)
    assert type(model.lm_head) is torch.nn.Linear and not hasattr(model.lm_head, "parametrizations")
    ids = torch.arange(32)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert master.grad.abs().sum() > 0


def test_every_method_starts_from_the_same_weights_and_trains():
    data = scratch.train_text()
    for method in ("fp32", "dqt-8"):
        model, logs = scratch.train(scratch.Run("0.3M", method, 3e-3, 2, 0), data)
        assert len(logs) == 2
    one, other = scratch.build("0.3M", "fp32", 1), scratch.build("0.3M", "dqt-8", 1)
    assert torch.equal(one.lm_head.weight, other.lm_head.weight)
    dense = one.model.layers[0].mlp.up_proj.weight
    assert (other.model.layers[0].mlp.up_proj.dense_weight() - dense).abs().max() < 0.01 * dense.abs().max() * 2


def test_nearest_never_moves_a_code_by_less_than_half_a_level():
    model = scratch.build("0.3M", "dqt-ternary", 0)
    optimizer = lb.DQTOptimizer(model, lr=1e-5)
    ids = torch.arange(32)[None]
    with scratch.nearest():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert sum(moved.changed for moved in optimizer.last_step.moved.values()) == 0
    assert leaves.round_step.__name__ == "round_step"
    optimizer.step()
    assert sum(moved.changed for moved in optimizer.last_step.moved.values()) > 0


def test_windows_are_the_seeds():
    data = scratch.train_text()
    one, same, other = (scratch.Windows(data, 5, seed) for seed in (0, 0, 1))
    assert one.starts == same.starts != other.starts
    assert one[0]["input_ids"].shape == (scratch.CONTEXT,)
