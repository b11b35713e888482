"""One process of the distributed test: `python -m tests.sparsity.ddp_worker <rank> <world> <port> <folder>`."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from hf_lowbit import DQTCallback
from hf_lowbit.nn.block_sparse import BlockWeight
from hf_lowbit.nn.sparsify import sparse_modules
from tests.sparsity.runs import DIRECT, Watch, WatchCodes, callback, model, snapshot
from tests.training.runs import Sentences, arguments


def main():
    rank, world, port, folder = sys.argv[1:5]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(rank), world_size=int(world))
    results = {}
    for score, compute, fields, architecture in (
        ("fro", "auto", {}, "llama"),
        ("act", "sparse", {}, "mixtral"),
        ("l1", "auto", DIRECT, "llama"),
    ):
        made, watch = model(architecture, **fields), WatchCodes() if fields else Watch()
        direct = [DQTCallback()] if fields else []
        # other data on each process
        trainer = Trainer(
            model=made, args=arguments(folder, max_steps=16, per_device_train_batch_size=2, weight_decay=0.1),
            train_dataset=Sentences(int(rank)), callbacks=[callback(score=score, compute=compute), *direct, watch],
        )  # fmt: skip
        trainer.train()
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        assert all(isinstance(weight, BlockWeight) for _, weight in sparse_modules(made))
        results[score] = {"model": snapshot(made), "masks": watch.masks}
    torch.save(results, Path(folder) / f"result-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
