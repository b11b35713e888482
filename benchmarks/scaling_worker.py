"""One process of benchmarks/scaling.py: `python -m benchmarks.scaling_worker <rank> <world> <port> <job as JSON>`.

Rank 0 prints what it measured as JSON. Times are medians, over steps, of the slowest process's.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hf_lowbit as lb
from benchmarks.scratch_models import CONTEXT, build
from hf_lowbit.training.replicas import digest


def slowest(seconds: float) -> float:
    """The same for all: a step is over when the last process is."""
    worst = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def timed(action, repeats: int) -> float:
    """Median seconds of `action`, after one call that is not counted."""
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        action()
        found.append(slowest(time.perf_counter() - begin))
    return statistics.median(found[1:])


def batch_of(samples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(256, (samples, CONTEXT), generator=generator)


def optimizer_of(model, method: str):
    if method.startswith("dqt"):
        return lb.DQTOptimizer(model, lr=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def halve_traffic(_, bucket):
    """Gradients travel as bfloat16. What torch's own `bf16_compress_hook` does, which it only allows with NCCL."""
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def compute(job: dict) -> dict:
    """Seconds of a step without communication, by samples."""
    found = {}
    for samples in job["samples"]:
        model = build(job["size"], job["method"], 0)
        optimizer, ids = optimizer_of(model, job["method"]), batch_of(samples)

        def once(model=model, optimizer=optimizer, ids=ids):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        found[samples] = timed(once, job["repeats"])
    gradients = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    stored = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    return {"seconds": found, "gradient_bytes": gradients, "stored_bytes": stored}


def reduces(job: dict) -> dict:
    """Seconds of an all-reduce, by bytes."""
    found = {}
    for size in job["bytes"]:
        tensor = torch.zeros(size // 4)
        found[size] = timed(lambda tensor=tensor: dist.all_reduce(tensor), job["repeats"])
    return {"seconds": found}


def steps(job: dict) -> dict:
    """Seconds of a whole data-parallel step, and a hash of the weights on every process after it."""
    model = build(job["size"], job["method"], 0)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=job["bucket_mb"])
    if job["hook"] == "bf16":
        wrapped.register_comm_hook(None, halve_traffic)
    optimizer, ids = optimizer_of(model, job["method"]), batch_of(job["samples"])

    def once():
        wrapped(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = timed(once, job["repeats"])
    digests = [None] * dist.get_world_size()
    whole = digest((name, p) for name, p in model.named_parameters())
    dist.all_gather_object(digests, whole)
    return {"seconds": seconds, "replicas_equal": len(set(digests)) == 1}


def main() -> None:
    rank, world, port, job = sys.argv[1:5]
    os.environ.update(RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(rank), world_size=int(world))
    job = json.loads(job)
    figures = {"compute": compute, "reduces": reduces, "steps": steps}[job["kind"]](job)
    if rank == "0":
        print(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
