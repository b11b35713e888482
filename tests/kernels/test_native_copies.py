"""The life of the copies that the torch-only tier keeps: bounded, seen to be stale, gone with the weight."""

import copy
import gc
import io
import pickle
import threading

import pytest
import torch

from hf_lowbit.functional.dispatch import choose, use_kernel
from hf_lowbit.functional.grid import TERNARY
from hf_lowbit.functional.linear import linear, reference_linear
from hf_lowbit.kernels.torch_native import copies, int4, integers
from tests.kernels.native_layers import make, problem_for


pytestmark = pytest.mark.usefixtures("one_thread_and_seed")
needs_int4 = pytest.mark.skipif(not int4.HAS_INT4, reason="torch has no fast int4 product on this processor")
# more rows than the int4 product is used for
MANY = 32


def warm(layer, rows=1):
    """Two calls of `linear`: the first makes the copy."""
    x = torch.ones(rows, layer[5]).to(torch.bfloat16)
    with torch.no_grad(), use_kernel("torch-native"):
        linear(x, *layer)
        return linear(x, *layer)


@needs_int4
def test_a_changed_weight_scale_or_zero_point_is_seen():
    weight, scale, zero_point, *rest = make(3, 32, True, (16, 64))
    other = make(3, 32, True, (16, 64), seed=1)
    expected = reference_of(other)
    warm((weight, scale, zero_point, *rest))
    for tensor, new in zip((weight, scale, zero_point), other[:3], strict=True):
        tensor.copy_(new)
        changed = (weight, scale, zero_point, *rest)
        torch.testing.assert_close(warm(changed), reference_of(changed), rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(warm((weight, scale, zero_point, *rest)), expected, rtol=2**-6, atol=2**-6)


@needs_int4
def test_new_scales_at_an_old_address_are_seen():
    weight, scale, _, *rest = make(4, 32, False, (16, 64))
    for factor in (1, 2, 3, 4):
        layer = (weight, scale * factor, None, *rest)
        torch.testing.assert_close(warm(layer), reference_of(layer), rtol=2**-6, atol=2**-6)
        del layer


def reference_of(layer):
    x = torch.ones(1, layer[5]).to(torch.bfloat16)
    return reference_linear(x, layer[0][0], *layer[1:4], problem_for(x, layer))


@needs_int4
def test_copies_die_with_the_weight():
    gc.collect()
    before = copies.held_bytes()
    layer = make(4, 32, False, (64, 64))
    warm(layer)
    # the codes again, and two bfloat16 a group
    int4_order = 64 * 32 + 64 * 2 * 4
    assert copies.held_bytes() - before == int4_order
    warm(layer, MANY)
    # and the weight as bfloat16
    assert copies.held_bytes() - before == int4_order + 64 * 64 * 2
    del layer
    gc.collect()
    assert copies.held_bytes() == before


@needs_int4
def test_deepcopy_and_pickle_leave_copies_behind():
    parameter = torch.nn.Parameter(make(4, 32, False, (64, 64))[0], requires_grad=False)
    _, *rest = make(4, 32, False, (64, 64))
    file, size = io.BytesIO(), len(pickle.dumps(parameter))
    y = warm((parameter, *rest))
    assert len(pickle.dumps(parameter)) == size
    torch.save(parameter, file)
    file.seek(0)
    held = copies.held_bytes()
    twins = [copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter)), torch.load(file)]
    assert copies.held_bytes() == held
    for twin in twins:
        assert torch.equal(warm((twin, *rest)), y)


@needs_int4
def test_many_rows_see_changed_weights_too():
    layer, other = (make(3, 32, True, (48, 64), seed) for seed in (0, 1))
    warm(layer, MANY)
    for tensor, new in zip(layer[:3], other[:3], strict=True):
        tensor.copy_(new)
    torch.testing.assert_close(warm(layer, MANY), warm(other, MANY), rtol=0, atol=0)


@needs_int4
def test_a_dense_copy_that_finds_no_room_is_not_made(monkeypatch):
    gc.collect()
    layer = make(4, 32, False, (64, 64))
    expected = warm(make(4, 32, False, (64, 64)), MANY)
    gc.collect()
    before = copies.held_bytes()
    monkeypatch.setenv(copies.REPACK_VARIABLE, str(before + 64 * 64 * 2 - 1))
    torch.testing.assert_close(warm(layer, MANY), expected, rtol=2**-6, atol=2**-6)
    assert copies.held_bytes() < before + 64 * 64 * 2


def test_the_report_says_what_is_kept(monkeypatch):
    x = torch.empty(1, 64, dtype=torch.bfloat16)
    monkeypatch.setenv("HF_LOWBIT_KERNEL", "torch-native")
    layer = make(4, 32, False, (600, 64))
    reason = choose(problem_for(x, layer)).reason
    assert "16 bits a weight for prompts and 4 for tokens" in reason and copies.REPACK_VARIABLE in reason
    assert "16 bits" in choose(problem_for(x, make(4, None, False, (600, 64)))).reason
    if integers.HAS_INTEGERS:
        assert "8 bits a weight" in choose(problem_for(x, make(2, None, False, (600, 64)), True)).reason
    assert choose(problem_for(x.float(), layer)).reason == "forced"


@needs_int4
@pytest.mark.parametrize("limit", ["0", "100"])
def test_copies_are_bounded(monkeypatch, limit):
    monkeypatch.setenv(copies.REPACK_VARIABLE, limit)
    gc.collect()
    before = copies.held_bytes()
    layer = make(4, 32, False, (64, 64))
    torch.testing.assert_close(warm(layer), reference_of(layer), rtol=2**-6, atol=2**-6)
    assert copies.held_bytes() == before
    monkeypatch.setenv(copies.REPACK_VARIABLE, "much")
    with pytest.raises(ValueError, match="much"):
        copies.repack_limit()


@needs_int4
def test_tensors_of_inference_mode_work_without_copies():
    with torch.inference_mode():
        layer = make(4, 32, False, (64, 64))
        before = copies.held_bytes()
        torch.testing.assert_close(warm(layer), reference_of(layer), rtol=2**-6, atol=2**-6)
    assert copies.held_bytes() == before
    # and buffers first made there serve ordinary tensors afterwards
    assert torch.isfinite(warm(make(4, 32, False, (64, 64)), MANY)).all()


def test_threads_do_not_share_blocks():
    layers = [make(TERNARY, 32, False, (200, 96), seed) for seed in range(4)]
    expected = [warm(layer, rows=64) for layer in layers]
    failures = []

    def work(layer, y):
        failures.extend(1 for _ in range(30) if not torch.equal(warm(layer, rows=64), y))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(layers, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
