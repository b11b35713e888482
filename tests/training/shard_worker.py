"""One process of the tests of shared rows; `tests.processes.run_two` starts two.

Each job trains twice from the same start, with and without sharing out gradients and states, and saves what the test
compares.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainerCallback

import hf_lowbit as lb
from hf_lowbit.training.shards import RowGradient
from tests.processes import save, work
from tests.training.runs import MODES, Sentences, accelerate_loop, arguments, model, snapshot


def train(folder, shared, made=None, resume=None, callbacks=(), rule="adamw", **fields):
    """The real Trainer under DDP, with other data in each process."""
    made = model(**MODES["8-learned-scale"]) if made is None else made
    given = {"max_steps": 6, "per_device_train_batch_size": 2, "max_grad_norm": 0.0, **fields}
    callback = lb.DQTCallback(rule, state_bits=8, check_replicas_every=2, shard_states=shared)
    args = arguments(folder, **given)
    data = Sentences(dist.get_rank())
    trainer = Trainer(
        model=made, args=args, train_dataset=data, eval_dataset=data, callbacks=[callback, *callbacks]
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    return trainer, callback


class Look(TrainerCallback):
    """What is held when the step is made, before any callback after it drops the gradients."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.shapes = set()

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        states = optimizer.state["hf_lowbit"]["weights"]
        self.bytes = sum(t.nbytes for tensors in states.values() for k, t in tensors.items() if k != "t")


def trainer_job(folder):
    found = {}
    for shared in (False, True):
        look = Look()
        trainer, callback = train(folder, shared, callbacks=[look])
        found[shared] = {
            "model": snapshot(trainer.model), "changed": callback.changed_codes, "bytes": look.bytes,
            "logs": [{k: v for k, v in e.items() if "dqt" in k} for e in trainer.state.log_history],
        }  # fmt: skip
    save(folder, "trainer", found)


def conv1d_job(folder):
    """GPT-2's weights lie the other way round; Lion at 4 bits a state."""
    found = [snapshot(train(folder, shared, model("gpt2", bits=4), rule="lion")[0].model) for shared in (False, True)]
    save(folder, "conv1d", found)


def clipped_job(folder):
    """Clipping by the global norm, and two backward passes a step, the first of which DDP does not reduce."""
    found = {}
    for shared in (False, True):
        made = model(bits=8)
        trainer, _ = train(folder, shared, made, max_grad_norm=0.1, gradient_accumulation_steps=2, max_steps=3)
        norms = [e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e]
        found[shared] = {"model": snapshot(made), "norms": norms}
    save(folder, "clipped", found)


def resume_job(folder):
    """Checkpoints are those of a run that shares nothing out, and go on in one that does."""
    root = Path(folder) / "resume"
    given = {"save_strategy": "steps", "save_steps": 3}
    whole, _ = train(root / "whole", False, **given)
    shared, _ = train(root / "shared", True, **given)
    again, _ = train(root / "again", True, resume=str(root / "whole" / "checkpoint-3"), **given)
    save(folder, "resume", [snapshot(t.model) for t in (whole, shared, again)])


def best_job(folder):
    """A checkpoint that an evaluation asks for, when all callbacks were told."""
    root = Path(folder) / "best"
    train(root, True, max_steps=2, save_strategy="best", metric_for_best_model="eval_loss", eval_strategy="steps",
          eval_steps=1, load_best_model_at_end=False)  # fmt: skip
    dist.barrier()
    saved = torch.load(root / "checkpoint-1" / "optimizer.pt", weights_only=True)["state"]["hf_lowbit"]
    save(folder, "best", saved["weights"])


def late_job(folder):
    """A checkpoint that nothing announced would lack the other process's states."""

    class Late(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            control.should_save = True

    try:
        train(Path(folder) / "late", True, max_steps=1, callbacks=[Late()])
    except RuntimeError as error:
        save(folder, "late", str(error))


def add_callback_job(folder):
    callback = lb.DQTCallback(shard_states=True)
    trainer = Trainer(model=model(bits=8), args=arguments(folder), train_dataset=Sentences())
    trainer.add_callback(callback)
    try:
        trainer.train()
    except ValueError as error:
        save(folder, "add_callback", str(error))


class Odd(nn.Module):
    """33, 7 and 1 rows for two processes, a branch that one of them may not take, and a weight that none uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.branch, self.second = nn.Linear(20, 33), nn.Linear(33, 33, bias=False), nn.Linear(33, 7)
        self.last, self.unused = nn.Linear(7, 1), nn.Linear(5, 5)
        self.reentrant = False

    def forward(self, x, branch=True):
        x = torch.tanh(self.first(x))
        if branch:
            x = checkpoint(self.branch, x, use_reentrant=True) if self.reentrant else self.branch(x)
        return self.last(torch.tanh(self.second(x)))


def odd():
    return lb.quantize(Odd(), lb.DQTConfig(bits=8, group_size="tensor"))


def step_odd(made, optimizer, batches, branches=(True, True), steps=3):
    for _ in range(steps):
        for x, branch in zip(batches, branches, strict=False):
            made(x, branch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(getattr(made, "module", made))


def batch(*seeds):
    return [torch.randn(4, 20, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


def make(shared, **options):
    made = odd()
    optimizer = lb.DQTOptimizer(made, lr=1e-2, state_bits=8, shard_states=shared, **options)
    return made, DistributedDataParallel(made, find_unused_parameters=True), optimizer


def one_job(folder):
    """Both processes have the same data: the mean of equal gradients is exact, and so are the codes."""
    made = odd()
    alone = step_odd(made, lb.DQTOptimizer(made, lr=1e-2, state_bits=8), batch(1, 2))
    _, wrapped, optimizer = make(True)
    grads = []
    optimizer.register_step_pre_hook(lambda o, *_: grads.extend(p.grad for g in o.param_groups for p in g["params"]))
    shared = step_odd(wrapped, optimizer, batch(1, 2))
    rows = [grad.local.shape[0] for grad in grads if isinstance(grad, RowGradient)]
    save(folder, "one", {"alone": alone, "shared": shared, "rows": rows})


def branch_job(folder):
    """Process 1 does not take the branch; nobody uses the weight that is not used."""
    rank, found = dist.get_rank(), []
    for shared in (False, True):
        made, wrapped, optimizer = make(shared)
        step_odd(wrapped, optimizer, batch(rank), [rank == 0])
        found.append({"model": snapshot(made), "states": set(optimizer.updater.state["weights"])})
    save(folder, "branch", found)


def reentrant_job(folder):
    """A backward pass within a backward pass."""
    rank, found = dist.get_rank(), []
    for reentrant in (False, True):
        made = odd()
        made.reentrant = reentrant
        # without DDP, which has rules of its own for this; what it would average stays as it is
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.requires_grad_(False)
        optimizer = lb.DQTOptimizer(made, lr=1e-2, shard_states=True)
        step_odd(made, optimizer, batch(rank), steps=2)
        found.append(snapshot(made))
    save(folder, "reentrant", found)


def nan_job(folder):
    """A gradient that is no number in one process skips the step in both."""
    made, wrapped, optimizer = make(True)
    before = snapshot(made)
    x = batch(0)[0] * (float("nan") if dist.get_rank() == 1 else 1.0)
    wrapped(x).sum().backward()
    optimizer.step()
    save(folder, "nan", {"before": before, "after": snapshot(made), "skipped": optimizer.last_step.skipped})


def state_job(folder):
    """States are saved whole, and loaded by rows."""
    made, wrapped, optimizer = make(True)
    step_odd(wrapped, optimizer, batch(dist.get_rank()))
    said = []
    try:
        optimizer.state_dict()
    except RuntimeError as error:
        said.append(str(error))
    optimizer.consolidate_state_dict()
    path = Path(folder) / "state.pt"
    if dist.get_rank() == 0:
        torch.save({"optimizer": optimizer.state_dict(), "model": snapshot(made)}, path)
    else:
        try:
            lb.DQTOptimizer(odd()).load_state_dict(optimizer.state_dict())
        except ValueError as error:
            said.append(str(error))
    dist.barrier()
    held = torch.load(path, weights_only=True)
    other, other_wrapped, other_optimizer = make(True)
    other.load_state_dict(held["model"])
    other_optimizer.load_state_dict(held["optimizer"])
    on = step_odd(wrapped, optimizer, batch(5)), step_odd(other_wrapped, other_optimizer, batch(5))
    save(folder, "state", {"said": said, "on": on})


def refused_job(folder):
    said, made = [], model(bits=8)
    for attempt in (
        lambda: lb.DQTOptimizer(DistributedDataParallel(made), shard_states=True),
        lambda: lb.DQTOptimizer(made.named_parameters(), shard_states=True),
        lambda: lb.DQTOptimizer(made, shard_states=True, release_gradients=True),
        lambda: lb.DQTOptimizer(made, shard_states=True, optimizer="lamb"),
        lambda: step_odd(made := odd(), lb.DQTOptimizer(made, shard_states=True), batch(dist.get_rank())),
    ):
        try:
            attempt()
        except (TypeError, ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    save(folder, "refused", said)


def accelerate_job(folder):
    accelerate_loop(folder, check=lambda made, optimizer: optimizer.consolidate_state_dict(), shard_states=True)


if __name__ == "__main__":
    work(globals())
