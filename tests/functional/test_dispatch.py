"""Choosing a kernel: rank, refusals as reasons, forcing one, and nothing leaking between threads."""

import threading

import pytest
import torch

from hf_lowbit.functional import dispatch
from hf_lowbit.functional.dispatch import Choice, Kernel, Problem, choose, kernel_names, register_kernel, use_kernel
from tests.functional.layers import make_layer, random


PROBLEM = Problem(4, 32, False, False, False, 8, 64, 1, torch.float32, "cpu")


def fixed_kernel(name, rank, value=0.0, refusal=None):
    return Kernel(name, rank, lambda problem: refusal, lambda x, w, *rest: x.new_full((len(x), len(w)), value))


@pytest.fixture
def kernels(monkeypatch):
    """A registry of its own: high (refuses), middle, low."""
    monkeypatch.setattr(dispatch, "_kernels", [])
    monkeypatch.setattr(dispatch, "_choices", {})
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    for kernel in (
        fixed_kernel("low", 1, 1.0),
        fixed_kernel("high", 9, 9.0, "too small"),
        fixed_kernel("middle", 5, 5.0),
    ):
        register_kernel(kernel)


def test_the_first_that_accepts_runs_with_the_reasons_of_the_others(kernels):
    assert kernel_names() == ["high", "middle", "low"]
    choice = choose(PROBLEM)
    assert (choice.kernel.name, choice.reason) == ("middle", "not high: too small")


def test_the_preferred_kernel_says_so(kernels):
    register_kernel(fixed_kernel("best", 99))
    assert choose(PROBLEM) == Choice(dispatch._kernels[0], "preferred")


def test_kernels_of_other_devices_go_without_saying(kernels):
    register_kernel(Kernel("elsewhere", 99, lambda problem: f"on {problem.device}", None, device="cuda"))
    assert choose(PROBLEM).reason == "not high: too small"
    assert choose(PROBLEM._replace(device="cuda")).reason == "not elsewhere: on cuda; not high: too small"
    with pytest.raises(ValueError, match="'elsewhere' was forced but can't run .*: on cpu"), use_kernel("elsewhere"):
        choose(PROBLEM)


def test_a_kernel_may_say_how_it_runs(kernels):
    how = Kernel("best", 99, lambda problem: None, None, remark=lambda problem: f"in tiles of {problem.rows}")
    register_kernel(how)
    assert choose(PROBLEM).reason == "preferred; in tiles of 1"
    register_kernel(how._replace(rank=8))
    assert choose(PROBLEM).reason == "not high: too small; in tiles of 1"


def test_a_new_kernel_replaces_its_namesake_and_old_choices(kernels):
    assert choose(PROBLEM).kernel.name == "middle"
    register_kernel(fixed_kernel("high", 9))
    assert choose(PROBLEM).kernel.name == "high"
    assert kernel_names() == ["high", "middle", "low"]


def test_the_choice_is_what_runs(kernels):
    layer, x = make_layer(), random(3, 10)
    with torch.no_grad():
        assert layer(x).unique().tolist() == [5.0]
        with use_kernel("low"):
            assert layer(x).unique().tolist() == [1.0]
    with use_kernel("low"):
        assert layer(x.requires_grad_()).unique().tolist() == [1.0]


def test_a_refusal_sees_the_whole_problem(kernels):
    seen = []
    register_kernel(Kernel("curious", 99, lambda problem: seen.append(problem) or "no", None))
    with torch.no_grad():
        make_layer(3, 4, False)(random(2, 7, 10, dtype=torch.bfloat16), None, True)
    assert seen == [Problem(3, 4, False, True, True, 5, 10, 14, torch.bfloat16, "cpu")]
    with torch.no_grad():
        make_layer("ternary", "tensor")(random(10))
    assert seen[1] == Problem("ternary", 0, True, False, False, 5, 10, 1, torch.float32, "cpu")


def test_refusals_are_asked_once_a_problem(kernels):
    asked = []
    register_kernel(Kernel("curious", 99, lambda problem: asked.append(problem) or "no", None))
    choices = [choose(PROBLEM), choose(PROBLEM._replace(rows=2)), choose(PROBLEM)]
    assert choices[0] is choices[2]
    assert asked == [PROBLEM, PROBLEM._replace(rows=2)]


def test_the_table_of_choices_is_bounded(kernels):
    for rows in range(10_000):
        choose(PROBLEM._replace(rows=rows))
    assert len(dispatch._choices) < 5_000


def test_nobody_accepts(kernels, monkeypatch):
    monkeypatch.setattr(dispatch, "_kernels", [fixed_kernel("a", 1, refusal="reason one")])
    with pytest.raises(RuntimeError, match="no kernel takes .*not a: reason one"):
        choose(PROBLEM)


@pytest.mark.parametrize("by", ["environment", "context"])
def test_forcing(kernels, monkeypatch, by):
    if by == "environment":
        monkeypatch.setenv("HF_LOWBIT_KERNEL", "low")
        assert choose(PROBLEM) == Choice(dispatch._kernels[2], "forced")
        monkeypatch.delenv("HF_LOWBIT_KERNEL")
    else:
        with use_kernel("low"):
            assert choose(PROBLEM) == Choice(dispatch._kernels[2], "forced")
    assert choose(PROBLEM).kernel.name == "middle"


def test_a_context_is_stronger_than_the_environment_and_nests(kernels, monkeypatch):
    monkeypatch.setenv("HF_LOWBIT_KERNEL", "low")
    with use_kernel("middle"):
        with use_kernel("low"):
            assert choose(PROBLEM).kernel.name == "low"
        assert choose(PROBLEM).kernel.name == "middle"
    assert choose(PROBLEM).kernel.name == "low"


def test_an_empty_variable_forces_nothing(kernels, monkeypatch):
    monkeypatch.setenv("HF_LOWBIT_KERNEL", "")
    assert choose(PROBLEM).kernel.name == "middle"


def test_the_context_ends_with_an_exception(kernels):
    with pytest.raises(KeyError), use_kernel("low"):
        raise KeyError
    assert choose(PROBLEM).kernel.name == "middle"


@pytest.mark.parametrize("by", ["environment", "context"])
def test_an_unknown_name_is_refused_with_the_known_ones(kernels, monkeypatch, by):
    message = r"`fast` is no registered kernel; use one of \['high', 'middle', 'low'\]"
    if by == "context":
        with pytest.raises(ValueError, match=message), use_kernel("fast"):
            pass
    else:
        monkeypatch.setenv("HF_LOWBIT_KERNEL", "fast")
        with pytest.raises(ValueError, match=message):
            choose(PROBLEM)


def test_a_forced_kernel_is_never_replaced(kernels):
    layer, x = make_layer(), random(3, 10)
    for record in (True, False):
        with torch.set_grad_enabled(record), use_kernel("high"):
            with pytest.raises(ValueError, match="kernel 'high' was forced but can't run .*: too small"):
                layer(x)


def test_a_forced_kernel_belongs_to_its_thread(kernels):
    """Two threads force different kernels, a third none, all three inside their blocks at the same time."""
    seen, barrier = {}, threading.Barrier(3, timeout=60)

    def work(name):
        if name is None:
            barrier.wait()
            seen[name] = choose(PROBLEM).kernel.name
            barrier.wait()
            return
        with use_kernel(name):
            barrier.wait()
            seen[name] = choose(PROBLEM).kernel.name
            barrier.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("low", "middle", None)]
    with use_kernel("low"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {"low": "low", "middle": "middle", None: "middle"}


def test_the_library_registers_a_reference_that_takes_everything():
    assert kernel_names()[-1] == "reference"
    odd = Problem(3, 5, False, True, True, 3, 7, 0, torch.float64, "meta")
    assert choose(odd).kernel.name == "reference"
    anywhere = [kernel.name for kernel in dispatch._kernels[:-1] if kernel.device is None]
    assert anywhere and all(f"not {name}: " in choose(odd).reason for name in anywhere)
