"""What layers compute together, counted."""

import pytest
import torch

from hf_lowbit.functional import several
from hf_lowbit.nn import sharing


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def products(monkeypatch):
    """Numbers of weights of the shared calls since the last look."""
    counts = []

    def count(x, weights, *rest):
        results = several.linear_several(x, weights, *rest)
        if not isinstance(results, str):
            counts.append(len(weights))
        return results

    def look():
        seen = list(counts)
        counts.clear()
        return seen

    monkeypatch.setattr(sharing, "linear_several", count)
    return look
