"""Where the C library comes from, and what happens without one: other kernels, and a reason in words."""

import os
import subprocess
import sys

import pytest
import torch

from hf_lowbit.functional.dispatch import choose
from hf_lowbit.functional.linear import linear, reference_linear
from hf_lowbit.kernels.cpu import library
from tests.kernels.weights import make_weight, problem_for


@pytest.fixture
def look_again(monkeypatch):
    """Changes the environment, then lets the library be found anew; afterwards everything is as before."""
    import hf_lowbit.functional.dispatch as dispatch

    def change(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        library.forget()
        dispatch._choices.clear()

    yield change
    monkeypatch.undo()
    library.forget()
    dispatch._choices.clear()


def check_product(reason):
    weight, x = make_weight(4, 64, False, 32, 128), torch.randn(3, 128)
    problem = problem_for(x, weight, 4, 64, 128, True)
    choice = choose(problem)
    assert not choice.kernel.name.startswith("cpu-") and reason in choice.reason
    with torch.no_grad():
        y = linear(x, *weight, None, 4, 128, 64, True)
    torch.testing.assert_close(y, reference_linear(x, *weight, None, problem), rtol=1e-4, atol=1e-4)


def test_switched_off(look_again):
    look_again(HF_LOWBIT_NO_C="1")
    check_product("HF_LOWBIT_NO_C is set")


def test_no_compiler(look_again, monkeypatch, tmp_path):
    monkeypatch.setattr(library, "_PACKAGE", tmp_path)
    look_again(PATH=str(tmp_path), CC="", HF_LOWBIT_CACHE=str(tmp_path))
    check_product("no C compiler")


def test_compiler_that_fails(look_again, monkeypatch, tmp_path):
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho cannot compile today >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(library, "_PACKAGE", tmp_path)
    look_again(CC=str(broken), HF_LOWBIT_CACHE=str(tmp_path / "cache"))
    check_product("cannot compile today")


def test_cache_that_can_not_be_written(look_again, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(library, "_PACKAGE", tmp_path)
    look_again(HF_LOWBIT_CACHE=str(tmp_path / "file"))
    check_product("building in")


def test_library_of_other_sources(look_again, monkeypatch, tmp_path):
    (tmp_path / "_lowbit_cpu.so").write_bytes(b"not a library")
    monkeypatch.setattr(library, "_PACKAGE", tmp_path)
    look_again(PATH=str(tmp_path), CC="", HF_LOWBIT_CACHE=str(tmp_path))
    check_product("does not load")


def test_two_processes_build_at_once(tmp_path):
    if library.load().handle is None:
        pytest.skip(library.load().reason)
    sources, cache = tmp_path / "csrc", tmp_path / "cache"
    sources.mkdir()
    functions = {
        "lowbit_abi": library.ABI,
        "lowbit_features": 0,
        "lowbit_linear": 0,
        "lowbit_linears": 0,
        "lowbit_rows": 0,
        "lowbit_experts": 0,
        "lowbit_update": 0,
        "lowbit_block_linear": 0,
        "lowbit_block_gradient": 0,
    }
    (sources / "lowbit_cpu.c").write_text(
        "\n".join(
            f'__attribute__((visibility("default"))) int {name}(void) {{ return {value}; }}'
            for name, value in functions.items()
        )
    )
    code = (
        "import pathlib, sys; from hf_lowbit.kernels.cpu import library; library._PACKAGE = pathlib.Path('/none');"
        "library._SOURCES = pathlib.Path(sys.argv[1]); loaded = library.load(); assert loaded.handle, loaded.reason"
    )
    environment = {**os.environ, "HF_LOWBIT_CACHE": str(cache)}
    command = [sys.executable, "-c", code, str(sources)]
    runs = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [run.wait() for run in runs] == [0, 0]
    # one library, and no remains
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["_lowbit_cpu.so"]


def test_import_is_cheap():
    # neither a compiler nor the library before the first product
    code = (
        "import sys, hf_lowbit.kernels as k; from hf_lowbit.kernels.cpu import library; "
        "assert library._loaded is None; assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
