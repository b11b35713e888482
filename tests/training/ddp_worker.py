"""One process of the distributed tests: `python -m tests.training.ddp_worker <rank> <world> <port> <folder> <job>...`.

All jobs run in one pair of processes, since starting them is what takes time. Each trains with data and global seeds
of its rank and saves what the test compares.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

import hf_lowbit as lb
from hf_lowbit.training.replicas import check_replicas, synchronize
from hf_lowbit.training.updater import direct_parameters
from tests.processes import save, work
from tests.training.runs import MODES, Sentences, accelerate_loop, arguments, model, snapshot


STEPS = 50


class Desynchronize(TrainerCallback):
    """What dropout and data code of an uneven length do to a process's global generator."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(1000 * dist.get_rank() + state.global_step)
        torch.rand(3 + dist.get_rank())


def trainer_job(folder, mode="8-ternary-forward", rule="adamw", rate=2e-3):
    """The real Trainer under DDP: other data on each rank, other generators."""
    made = model(**MODES[mode])
    args = arguments(folder, max_steps=STEPS, per_device_train_batch_size=2, logging_steps=25, learning_rate=rate)
    data = Sentences(dist.get_rank())
    callback = lb.DQTCallback(rule, state_bits=8, check_replicas_every=10)
    trainer = Trainer(model=made, args=args, train_dataset=data, callbacks=[callback, Desynchronize()])
    trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    name = f"trainer:{mode}" if rule == "adamw" else rule
    save(folder, name, {"model": snapshot(made), "changed": callback.changed_codes})


def lars_job(folder):
    """Layer-wise steps: the norms, and so the rates, must agree too. Floats are moved by AdamW at the same rate."""
    trainer_job(folder, rule="lars", rate=0.5)


def mlperf_job(folder):
    """One log, of the whole batch; both processes stop at the same step, whatever each of them saw."""
    from tests.training.countings import TARGET, run

    path = Path(folder) / "mlperf.txt"
    callback = lb.MLPerfCallback(path, "hf_lowbit_counting", TARGET)
    trainer = run(Path(folder) / "out", callback)
    facts = {"step": trainer.state.global_step, "model": snapshot(trainer.model), "writes": callback._log is not None}
    save(folder, "mlperf", {**facts, "reached": callback.reached, "batch": callback._batch})


def loop_job(folder):
    """A loop of one's own: DDP halves equal a whole batch in one process (the test compares)."""
    made = model(bits=8)
    wrapped = DistributedDataParallel(made)
    optimizer = lb.DQTOptimizer(wrapped, lr=2e-3)
    ids = Sentences().ids
    rank = dist.get_rank()
    for step in range(4):
        part = ids[4 * step + 2 * rank : 4 * step + 2 * rank + 2]
        wrapped(input_ids=part, labels=part).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save(folder, "loop", {"model": snapshot(made)})


def start_job(folder):
    """Processes that start from different codes are made equal, scales included."""
    made = model(bits=8)
    parameters = direct_parameters(made)
    if dist.get_rank() == 1:
        for _, parameter in parameters:
            parameter.stored.neg_()
            parameter.scale.mul_(2)
    synchronize(parameters)
    check_replicas(parameters, 0)
    save(folder, "start", {"model": snapshot(made)})


def diverged_job(folder):
    """A replica that differs in one code is found."""
    made = model(bits=8)
    parameters = direct_parameters(made)
    if dist.get_rank() == 1:
        parameters[3][1].stored.view(-1)[5] ^= 1
    try:
        check_replicas(parameters, 7)
    except RuntimeError as error:
        save(folder, "diverged", str(error))


def ranks_own_noise_job(folder):
    """What happens with a seed of each rank: the check must see it."""
    made = model(bits=8)
    wrapped = DistributedDataParallel(made)
    optimizer = lb.DQTOptimizer(wrapped, lr=2e-3, seed=dist.get_rank())
    ids = Sentences().ids[:4]
    wrapped(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    try:
        check_replicas(direct_parameters(made), 1)
    except RuntimeError as error:
        save(folder, "ranks_own_noise", str(error))


def accelerate_job(folder):
    accelerate_loop(folder, epochs=2, check=lambda made, optimizer: check_replicas(direct_parameters(made), 4))


def release_job(folder):
    """Release of gradients is refused in more than one process."""
    wrapped = DistributedDataParallel(model(bits=8))
    lb.DQTOptimizer(wrapped, release_gradients=True)
    ids = Sentences().ids[:2]
    try:
        wrapped(input_ids=ids, labels=ids).loss.backward()
    except RuntimeError as error:
        save(folder, "release", str(error))


if __name__ == "__main__":
    work(globals())
