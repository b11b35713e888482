"""How many samples a model sees before it reaches a target, by batch size, optimizer, and how its weights are held.

    N(B) = B * steps until the target

Small batches need about the same N whatever B is; beyond some batch N grows with B, since steps hardly get fewer.
Which optimizer postpones that is what LARS and LAMB are about (You et al. 2017 and 2020, Yamazaki et al. 2019). The
task is given (`Task`); `large_batch.py` and `vision.py` are two.

What makes the comparison fair: every cell (way, optimizer, batch) searches its own learning rate, with one seed, in
steps of 3 from the rate that was best at the batch before, up and down until that gets worse; so no cell is held to
another one's rate, and none ends at the edge of a grid. The rate with the fewest samples is then run with the other
seeds. A run of the search ends early when it is behind the best one of its cell already. The rate rises linearly over
the first WARMUP of a run's budget of samples and is constant then: a decay would need to know the end, which is what
is measured.

Batches above MICRO samples are accumulated. Weights are float32 and the forward pass bfloat16 (autocast), or 8-bit
codes that are moved directly (`lb.DQTOptimizer`), float parameters then by the same rule.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from tqdm import tqdm

import hf_lowbit as lb
from benchmarks.record import Record, watch
from hf_lowbit.training.updater import direct_parameters


MICRO, WARMUP, FACTOR, MOST_RATES = 256, 0.05, 3, 6
WAYS = {"bf16": None, "dqt-8": {"bits": 8}}
# of float weights, and where the search for the rate of the smallest batch begins
OPTIMIZERS = {
    "sgd": (lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9), 0.1),
    "adamw": (lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.0), 3e-3),
    "lars": (lambda params, lr: lb.LARS(params, lr=lr), 3.0),
    "lamb": (lambda params, lr: lb.LAMB(params, lr=lr), 1e-2),
}


@dataclass(frozen=True)
class Task:
    """What is learned. `quality` is better when smaller; a run ends when it is at most `target`."""

    build: Callable[[int], nn.Module]  # seed -> dense model
    batches: Callable[[int, int], Iterator[dict]]  # (seed, batch) -> endless batches, keyword arguments of the model
    quality: Callable[[nn.Module], float]
    target: float
    budget: Callable[[int], int]  # batch -> samples at most
    every: Callable[[int], int]  # batch -> steps between evaluations
    loss: Callable[[nn.Module, dict], torch.Tensor] = lambda model, batch: model(**batch).loss


@dataclass(frozen=True)
class Cell:
    """What is compared. `model` tells apart the models of a file that has several."""

    way: str
    optimizer: str
    batch: int
    model: str = ""

    @property
    def start(self) -> str:
        """What the keys of its rows begin with."""
        return f"{self.model}{'/' if self.model else ''}{self.way}/{self.optimizer}/{self.batch}/"

    def key(self, rate: float, seed: int) -> str:
        return f"{self.start}{rate:.3g}/seed{seed}"


def optimizer_of(model: nn.Module, cell: Cell, rate: float, seed: int):
    if WAYS[cell.way] is None:
        return OPTIMIZERS[cell.optimizer][0](model.parameters(), rate)
    return lb.DQTOptimizer(model, lr=rate, optimizer=cell.optimizer, seed=seed)


def make(task: Task, way: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = task.build(seed)
    return model if WAYS[way] is None else lb.quantize(model, lb.DQTConfig(**WAYS[way]))


def run(task: Task, cell: Cell, rate: float, seed: int, behind: float = math.inf) -> dict:
    """Train until the target, the end of the budget, a loss that is no number, or `behind` samples."""
    model = make(task, cell.way, seed)
    optimizer = optimizer_of(model, cell, rate, seed)
    steps = max(1, task.budget(cell.batch) // cell.batch)
    warmup, batches, shares = max(1, round(WARMUP * steps)), task.batches(seed, cell.batch), []
    codes = sum(parameter.numel() for _, parameter in direct_parameters(model))
    found = {"samples": None, "stopped": "budget", "quality": []}
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / warmup)
        if not math.isfinite(backward(model, next(batches), task.loss)):
            return {**found, "stopped": "diverged"}
        optimizer.step()
        optimizer.zero_grad()
        if WAYS[cell.way] is not None:
            moved = optimizer.last_step.moved.values()
            shares.append(sum(m.changed for m in moved) / codes)
        if step % task.every(cell.batch) == 0 or step == steps:
            quality = task.quality(model)
            found["quality"].append([step * cell.batch, round(quality, 4)])
            if quality <= task.target:
                found.update(samples=step * cell.batch, stopped="reached")
                break
            if step * cell.batch >= behind:
                found["stopped"] = "behind"
                break
    if shares:
        found["changed_rate"] = float(f"{statistics.fmean(shares):.3g}")
    return found


def backward(model: nn.Module, batch: dict, loss_of: Callable = Task.loss) -> float:
    """Gradients of the mean loss of a batch, in parts of MICRO samples; the loss."""
    count = len(next(iter(batch.values())))
    total = 0.0
    model.train()
    for start in range(0, count, MICRO):
        part = {name: tensor[start : start + MICRO] for name, tensor in batch.items()}
        share = len(next(iter(part.values()))) / count
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, part) * share
        loss.backward()
        total += float(loss.detach())
    return total


def better(one: dict | None, other: dict | None) -> bool:
    """Whether a run was better: fewer samples, or, of runs that did not arrive, the lower quality."""
    if one is None or other is None:
        return one is not None
    if one["samples"] is not None or other["samples"] is not None:
        return (one["samples"] or math.inf) < (other["samples"] or math.inf)
    return last(one) < last(other)


def last(row: dict) -> float:
    """The quality a run ended with; infinite when it diverged."""
    return row["quality"][-1][1] if row["quality"] and row["stopped"] != "diverged" else math.inf


def search(start: float, measure: Callable[[float, float], dict]) -> float:
    """The rate with the fewest samples: up by FACTOR until it gets worse, else down.

    measure: (rate, samples of the best so far) -> row; at most MOST_RATES calls.
    """
    rows = {start: measure(start, math.inf)}
    best = start
    for factor in (FACTOR, 1 / FACTOR):
        while len(rows) < MOST_RATES:
            rate = float(f"{best * factor:.3g}")
            if rate in rows:
                break
            rows[rate] = measure(rate, rows[best]["samples"] or math.inf)
            if not better(rows[rate], rows[best]):
                break
            best = rate
    return best


def chosen(rows: dict, cell: Cell, seed: int = 0) -> float | None:
    """The best rate among the rows of a cell, None where there is none."""
    end = f"/seed{seed}"
    found = {float(key.removeprefix(cell.start).removesuffix(end)): row for key, row in rows.items()
             if key.startswith(cell.start) and key.endswith(end)}  # fmt: skip
    best = None
    for rate, row in found.items():
        if better(row, found.get(best)):
            best = rate
    return best


def samples_of(rows: dict, cell: Cell, seeds) -> list[float]:
    """Samples to the target at the cell's rate, seed by seed; infinite where it was not reached."""
    rate = chosen(rows, cell)
    found = [] if rate is None else [rows.get(cell.key(rate, seed)) for seed in seeds]
    return [math.inf if row["samples"] is None else row["samples"] for row in found if row is not None]


def cells(ways, optimizers, batches, model: str = "") -> list[Cell]:
    """From small batches to large ones, since those begin their search where the smaller ended."""
    return [Cell(way, optimizer, batch, model) for batch in batches for optimizer in optimizers for way in ways]


def sweep(record: Record, task: Task, plan: list[Cell], seeds, deadline: float) -> bool:
    """Measure what is missing until `deadline` (of `time.monotonic`); whether everything is there now."""

    class TimeIsUp(Exception):
        pass

    def measure(cell: Cell, rate: float, seed: int, behind: float = math.inf) -> dict:
        key = cell.key(rate, seed)
        if key not in record.rows:
            if time.monotonic() > deadline:
                raise TimeIsUp
            with watch() as spent:
                figures = run(task, cell, rate, seed, behind)
            record.add(key, {**figures, "wall_seconds": round(spent.seconds, 1)})
        return record.rows[key]

    best: dict[tuple[str, str], float] = {}
    try:
        for cell in tqdm(plan):
            start = best.get((cell.way, cell.optimizer), OPTIMIZERS[cell.optimizer][1])
            rate = search(start, lambda rate, behind, cell=cell: measure(cell, rate, seeds[0], behind))
            best[cell.way, cell.optimizer] = rate
            if record.rows[cell.key(rate, seeds[0])]["samples"] is not None:
                for seed in seeds[1:]:
                    measure(cell, rate, seed)
    except TimeIsUp:
        print("time is up; run this again to continue.")
        return False
    return True


def summary(rows: dict, plan: list[Cell], seeds) -> str:
    """Median samples to the target, lowest and highest, and the learning rate."""
    lines = [f"{'way':8}{'optimizer':10}{'batch':>6}{'rate':>9}{'runs':>5}{'samples':>9}{'low':>8}{'high':>8}"]
    for cell in plan:
        counts = samples_of(rows, cell, seeds)
        if counts:
            lines.append(
                f"{cell.way:8}{cell.optimizer:10}{cell.batch:>6}{chosen(rows, cell):>9.3g}{len(counts):>5}"
                f"{statistics.median(counts):>9.0f}{min(counts):>8.0f}{max(counts):>8.0f}"
            )
    return "\n".join(lines)
