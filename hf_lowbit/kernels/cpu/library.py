"""Finds, or once makes, the C library; why there is none is data.

Order: `hf_lowbit/_lowbit_cpu.so`, built with the wheel; else a build of csrc/ by the machine's compiler under
~/.cache/hf_lowbit/, named by the hash of the sources and the compiler, made at the first product and kept. Set
HF_LOWBIT_NO_C=1 to use neither, or HF_LOWBIT_LIBRARY to use one file and no other. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

# torch first: its wheel brings the OpenMP runtime, and the library must find that one
import torch  # noqa: F401


NO_C_VARIABLE = "HF_LOWBIT_NO_C"
CACHE_VARIABLE = "HF_LOWBIT_CACHE"
LIBRARY_VARIABLE = "HF_LOWBIT_LIBRARY"
# the value of lowbit_abi() that this file can call
ABI = 4
AVX2, AVX_VNNI, AVX512, AVX512_BF16, AMX = 1, 2, 4, 8, 16
_PACKAGE = Path(__file__).resolve().parents[2]
_SOURCES = _PACKAGE / "csrc"
# -O2: more would double the time to compile and gain nothing; -std=c11 keeps compilers from fusing roundings
_FLAGS = "-O2 -ftree-vectorize -fvect-cost-model=dynamic -std=c11 -fPIC -fvisibility=hidden -pthread".split()
_lock = threading.Lock()


class ProblemRecord(ctypes.Structure):
    """`struct lowbit_problem` of csrc/problem.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "field", "offset", "group", "groups", "scale_stride", "scale_type", "grouped", "int8", "type",
            "rows", "columns", "row_bytes",
        )
    ]  # fmt: skip


class BlocksRecord(ctypes.Structure):
    """`struct lowbit_blocks` of csrc/blocks.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "type", "block_rows", "height", "width", "live", "in_features", "m", "x_stride", "threads", "field",
            "offset", "row_bytes", "int8",
        )),
        *((name, ctypes.c_void_p) for name in ("x", "values", "scale", "columns", "pointers", "y")),
    ]  # fmt: skip


class BlockGradientRecord(ctypes.Structure):
    """`struct lowbit_block_gradient` of csrc/blocks.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "block_rows", "height", "width", "live", "in_features", "m", "x_stride", "dy_stride", "threads",
        )),
        *((name, ctypes.c_void_p) for name in ("x", "dy", "columns", "pointers", "out")),
    ]  # fmt: skip


class UpdateRecord(ctypes.Structure):
    """`struct lowbit_update` of csrc/lowbit_update.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "field", "offset", "qmin", "qmax", "group", "scale_stride", "scale_type", "rows", "columns", "row_bytes",
            "grad_type", "grad_row", "grad_column", "rule", "first", "nesterov", "state_bits", "blocks", "width",
            "state_row", "row_key", "column_key", "threads",
        )),
        *((name, ctypes.c_double) for name in (
            "beta1", "rest1", "beta2", "rest2", "eps", "factor", "rate", "decay",
        )),
        *((name, ctypes.c_void_p) for name in ("stored", "scale", "zero", "grad")),
        ("m_codes", ctypes.c_void_p), ("m_base", ctypes.c_void_p), ("m_signed", ctypes.c_int64),
        ("v_codes", ctypes.c_void_p), ("v_base", ctypes.c_void_p), ("v_signed", ctypes.c_int64),
        ("changed", ctypes.c_int64), ("levels", ctypes.c_int64),
    ]  # fmt: skip


class Loaded(NamedTuple):
    """The library, or the reason for its absence. `linear` is `lowbit_linear` and so on, `features` what the processor
    has."""

    handle: ctypes.CDLL | None
    reason: str
    features: int = 0
    linear: Callable[..., int] | None = None
    linears: Callable[..., int] | None = None
    rows: Callable[..., int] | None = None
    experts: Callable[..., int] | None = None
    block_linear: Callable[..., int] | None = None
    update: Callable[..., int] | None = None
    block_gradient: Callable[..., int] | None = None


_loaded: Loaded | None = None


def load() -> Loaded:
    """The library, found or built at the first call. Never raises: see `reason`."""
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _find()
    return _loaded


def forget() -> None:
    """Look again at the next `load`; for tests that change the environment."""
    global _loaded
    _loaded = None


def address_of(record: ProblemRecord) -> int:
    """Where a record lies; it must be kept alive by the caller."""
    return ctypes.addressof(record)


def _find() -> Loaded:
    if os.environ.get(NO_C_VARIABLE, "") not in ("", "0"):
        return Loaded(None, f"{NO_C_VARIABLE} is set")
    named, shipped = os.environ.get(LIBRARY_VARIABLE), _PACKAGE / "_lowbit_cpu.so"
    reasons: list[str] = []
    places = (lambda: shipped if shipped.exists() else None, partial(_build, reasons))
    for locate in places if not named else (lambda: Path(named),):
        path = locate()
        if path is None:
            continue
        try:
            return _open(path)
        except (OSError, AttributeError) as error:
            reasons.append(f"{path.name} does not load ({error})")
    return Loaded(None, "; ".join(reasons))


def _open(path: Path) -> Loaded:
    handle = ctypes.CDLL(str(path))
    if handle.lowbit_abi() != ABI:
        raise OSError(f"it was built from other sources: its interface is {handle.lowbit_abi()}, not {ABI}")
    linear = handle.lowbit_linear
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    linear.argtypes = [pointer, number, number, number, pointer, number] + [pointer] * 4 + [number, pointer]
    linears = handle.lowbit_linears
    linears.argtypes = [pointer] + [number] * 3 + [pointer, number, number, pointer]
    rows = handle.lowbit_rows
    rows.argtypes = [pointer] + [number] * 3 + [pointer, number] + [pointer] * 4
    experts = handle.lowbit_experts
    experts.argtypes = (
        [pointer] + [number] * 3 + [pointer, number] + [pointer, number] + [pointer] * 4 + [number, pointer]
    )
    block_linear = handle.lowbit_block_linear
    block_linear.argtypes = [pointer, number]
    update = handle.lowbit_update
    update.argtypes = [pointer, number]
    block_gradient = handle.lowbit_block_gradient
    block_gradient.argtypes = [pointer, number]
    features = handle.lowbit_features()
    return Loaded(handle, str(path), features, linear, linears, rows, experts, block_linear, update, block_gradient)


def _build(reasons: list[str]) -> Path | None:
    """Compile csrc/ into the cache unless it is there. On failure adds a sentence to `reasons` and returns None."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    if compiler is None:
        reasons.append("there is no C compiler, and the package was installed without a compiled library")
        return None
    digest = hashlib.sha256(repr((compiler, os.stat(compiler).st_mtime_ns, _FLAGS)).encode())
    for source in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(source.read_bytes())
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "hf_lowbit")
    target = cache / digest.hexdigest()[:16] / "_lowbit_cpu.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # two processes may build at once: each writes its own file, and the last rename wins with the same content
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            message = _compile(compiler, built)
            if message is not None:
                reasons.append(f"{compiler} failed: {message}")
                return None
            os.replace(built, target)
    except (OSError, subprocess.SubprocessError) as error:
        reasons.append(f"building in {target.parent} failed ({error})")
        return None
    return target


def _compile(compiler: str, target: Path) -> str | None:
    """None, or the end of the compiler's complaint. Some compilers lack OpenMP: the second try does without.

    The files of the source compile at once, and are linked then.
    """
    sources = sorted(_SOURCES.glob("*.c"))
    parts = [target.with_name(f"{source.stem}.o") for source in sources]
    for extra in (["-fopenmp"], []):
        begin = [compiler, *_FLAGS, *extra]
        compilations = [
            subprocess.Popen([*begin, "-c", str(source), "-o", str(part)], stderr=subprocess.PIPE, text=True)
            for source, part in zip(sources, parts, strict=True)
        ]
        complaint = "".join([compilation.communicate(timeout=300)[1] for compilation in compilations])
        if any(compilation.returncode for compilation in compilations):
            continue
        linking = [*begin, "-shared", *map(str, parts), "-o", str(target), "-lm"]
        result = subprocess.run(linking, capture_output=True, text=True, timeout=300)
        if result.returncode == 0:
            return None
        complaint = result.stderr
    return complaint.strip()[-300:]
