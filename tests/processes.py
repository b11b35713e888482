"""Two real processes that find each other on a free port, for tests of distributed training."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


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


def work(jobs: dict[str, Callable]) -> None:
    """What a module that `run_two` starts does: the jobs `<name>_job` that its arguments name, one after another, each
    called with the folder and what follows a colon. Every process has a global seed of its own."""
    rank, world, port, folder = sys.argv[1:5]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    torch.manual_seed(int(rank))
    dist.init_process_group("gloo", rank=int(rank), world_size=int(world))
    for job in sys.argv[5:]:
        name, _, argument = job.partition(":")
        jobs[f"{name}_job"](folder, *filter(None, [argument]))
        dist.barrier()
    dist.destroy_process_group()


def save(folder, name: str, content) -> None:
    """Leave what a job found to the test, one file a process."""
    torch.save(content, Path(folder) / f"{name}-{dist.get_rank()}.pt")


def saved(folder, *jobs: str) -> dict[str, list]:
    """What the processes left, by job."""
    return {job: [torch.load(Path(folder) / f"{job}-{r}.pt", weights_only=False) for r in range(2)] for job in jobs}
