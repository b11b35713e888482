"""Two processes over gloo with different data: the same masks at every step, the same weights at the end."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch


ROOT = Path(__file__).parents[2]
# seconds; a process that waits for one that died would wait for ever
PATIENCE = 600


def test_processes_agree(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sparsity.ddp_worker", str(rank), "2", port, str(tmp_path)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)[-6000:]
    one, other = (torch.load(tmp_path / f"result-{rank}.pt", weights_only=False) for rank in range(2))
    for score in ("fro", "act"):
        assert all(torch.equal(t, other[score]["model"][n]) for n, t in one[score]["model"].items())
        for mine, theirs in zip(one[score]["masks"], other[score]["masks"], strict=True):
            assert all(torch.equal(mask, theirs[name]) for name, mask in mine.items())
