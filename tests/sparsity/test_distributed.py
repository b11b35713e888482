"""Two processes over gloo with different data: the same masks at every step, the same weights at the end."""

import torch

from tests.processes import run_two


def test_processes_agree(tmp_path):
    run_two("tests.sparsity.ddp_worker", str(tmp_path))
    one, other = (torch.load(tmp_path / f"result-{rank}.pt", weights_only=False) for rank in range(2))
    for score in ("fro", "act", "l1"):
        assert all(torch.equal(t, other[score]["model"][n]) for n, t in one[score]["model"].items())
        for mine, theirs in zip(one[score]["masks"], other[score]["masks"], strict=True):
            assert all(torch.equal(mask, theirs[name]) for name, mask in mine.items())
