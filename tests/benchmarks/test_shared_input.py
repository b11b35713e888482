"""The benchmark of shared inputs: complete figures of real layers."""

import pytest

from benchmarks import shared_input
from hf_lowbit.kernels.cpu import library


@pytest.mark.skipif(library.load().handle is None, reason="only kernels of the C library share")
def test_figures_are_complete(monkeypatch):
    monkeypatch.setattr(shared_input, "GROUPS", {"tiny": (64, (32, 16), 2)})
    scheme = shared_input.SCHEMES["ternary"]
    assert set(shared_input.measure_group("tiny", scheme, 16, turns=1)) == {"apart us", "together us", "ratio"}
    parts = shared_input.measure_parts(scheme, 1, turns=1, size=64)
    assert all(parts[f"{name} us"] > 0 for name in ("call", "library", "preparation"))
