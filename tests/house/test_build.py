"""The build hook: kernels are compiled where there is a C compiler; without one the log says why."""

import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hatch_build import NotCompiled, compile_library, find_compiler
from hf_lowbit.kernels.cpu import library


ROOT = Path(__file__).parents[2]
GOOD = '__attribute__((visibility("default"))) int lowbit_answer(void) { return 42; }\n'
BROKEN = "int lowbit_answer(void) { return undeclared; }\n"
SETTINGS = ("CC", "HF_LOWBIT_NO_C", "HF_LOWBIT_REQUIRE_C")

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="this machine has no C compiler"
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "csrc" / "lowbit_cpu.c"
    path.parent.mkdir()
    path.write_text(GOOD)
    return path


@needs_compiler
def test_library_is_compiled_and_loads(source, tmp_path):
    command = compile_library(source.parent, tmp_path / "lowbit.so")
    assert ctypes.CDLL(str(tmp_path / "lowbit.so")).lowbit_answer() == 42
    assert not any(flag.startswith(("-march", "-mtune")) for flag in command)


@needs_compiler
def test_compiler_without_openmp(source, tmp_path, monkeypatch):
    compiler = tmp_path / "plain-cc"
    real = " ".join(find_compiler())
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1;; esac\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    command = compile_library(source.parent, tmp_path / "lowbit.so")
    assert command[0] == str(compiler)
    assert "-fopenmp" not in command


@needs_compiler
def test_install_and_first_use_compile_alike(source, tmp_path):
    """A machine with a pure Python wheel makes the library at first use; it gets the flags that a wheel's has."""
    assert set(library._FLAGS) <= set(compile_library(source.parent, tmp_path / "lowbit.so"))


def test_cc_may_carry_arguments(monkeypatch):
    monkeypatch.setenv("CC", f"{sys.executable} -I")
    assert find_compiler() == [sys.executable, "-I"]


@needs_compiler
def test_missing_cc_falls_back(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert find_compiler()[0] in ("cc", "gcc", "clang")


def test_no_compiler_at_all(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NotCompiled, match="no C compiler was found .tried no-such-compiler, cc, gcc, clang"):
        compile_library(source.parent, tmp_path / "lowbit.so")


def test_missing_source(tmp_path):
    with pytest.raises(NotCompiled, match="no C file in .*absent"):
        compile_library(tmp_path / "absent", tmp_path / "lowbit.so")


def test_switched_off(source, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_LOWBIT_NO_C", "1")
    with pytest.raises(NotCompiled, match="HF_LOWBIT_NO_C is set"):
        compile_library(source.parent, tmp_path / "lowbit.so")


@needs_compiler
def test_broken_source_shows_what_the_compiler_said(source, tmp_path):
    source.write_text(BROKEN)
    with pytest.raises(NotCompiled, match="undeclared"):
        compile_library(source.parent, tmp_path / "lowbit.so")


@pytest.fixture
def project(tmp_path):
    """A project of the same making, with a one-function C file."""
    root = tmp_path / "project"
    for name in ("pyproject.toml", "hatch_build.py", "_hf_lowbit_autoload.py", "hf_lowbit_autoload.pth", "LICENSE"):
        root.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "README.md").write_text("# hf_lowbit\n")
    (root / "hf_lowbit/csrc").mkdir(parents=True)
    (root / "hf_lowbit/__init__.py").write_text('__version__ = "0.1.0"\n')
    (root / "hf_lowbit/csrc/lowbit_cpu.c").write_text(GOOD)
    # what an editable install leaves in the tree must not travel into a wheel
    (root / "hf_lowbit/_lowbit_cpu.so").write_bytes(b"stale")
    return root


def build_wheel(root, **env):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    return subprocess.run(command, cwd=root, env={**os.environ, **env}, capture_output=True, text=True)


def wheel_of(root, **env):
    result = build_wheel(root, **env)
    assert result.returncode == 0, result.stderr
    (wheel,) = (root / "dist").glob("*.whl")
    return wheel.name, set(zipfile.ZipFile(wheel).namelist()), result.stdout + result.stderr


HOOK = {"_hf_lowbit_autoload.py", "hf_lowbit_autoload.pth"}


@needs_compiler
def test_wheel_with_kernels(project):
    name, files, log = wheel_of(project)
    assert name.startswith("hf_lowbit-0.1.0-py3-none-") and not name.endswith("-any.whl")
    assert HOOK | {"hf_lowbit/_lowbit_cpu.so", "hf_lowbit/csrc/lowbit_cpu.c"} <= files
    assert "hf_lowbit compiled its C kernels" in log


def test_wheel_without_kernels(project):
    name, files, log = wheel_of(project, HF_LOWBIT_NO_C="1")
    assert name == "hf_lowbit-0.1.0-py3-none-any.whl"
    assert HOOK <= files
    assert "hf_lowbit/_lowbit_cpu.so" not in files
    assert "hf_lowbit is built without its C kernels: HF_LOWBIT_NO_C is set." in log


def test_kernels_can_be_required(project):
    result = build_wheel(project, HF_LOWBIT_NO_C="1", HF_LOWBIT_REQUIRE_C="1")
    assert result.returncode != 0
    assert "HF_LOWBIT_NO_C is set." in result.stdout + result.stderr
