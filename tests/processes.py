"""Two real processes that find each other on a free port, for tests of distributed training."""

import os
import socket
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]
# seconds; a process that waits for one that died would wait for ever
PATIENCE = 600


def run_two(module: str, *arguments: str) -> None:
    """Run `python -m module rank 2 port *arguments` for ranks 0 and 1; fails with their output unless both succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), "2", port, *arguments],
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
