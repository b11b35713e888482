"""The sweep finds the rate it should, stops where it should, counts samples, and continues where it stopped."""

import gzip
import math

import pytest
import torch
from torch import nn

from benchmarks import batch_sweep, images, large_batch, vision
from benchmarks.batch_sweep import Cell, Task, backward, better, cells, chosen, run, samples_of, search, summary, sweep
from benchmarks.record import Record


def rows_of(**ends):
    """rate -> row, from what the runs ended with: samples, or a quality."""
    return {float(rate): {"samples": end if isinstance(end, int) else None, "stopped": "budget",
                          "quality": [[64, end if isinstance(end, float) else 0.0]]}
            for rate, end in ends.items()}  # fmt: skip


@pytest.mark.parametrize(
    ("ends", "best", "tried"),
    [
        pytest.param({"1": 90, "3": 60, "9": 30, "27": 40}, 9, [1, 3, 9, 27], id="up"),
        pytest.param({"1": 90, "3": 95, "0.333": 50, "0.111": 70}, 0.333, [1, 3, 0.333, 0.111], id="down"),
        pytest.param({"1": 90, "3": 90, "0.333": 90}, 1, [1, 3, 0.333], id="stay"),
        pytest.param({"1": 2.0, "3": 1.0, "9": 1.5, "0.333": 3.0}, 3, [1, 3, 9], id="by-quality"),
        pytest.param({"1": 2.0, "3": 70, "9": 1.5}, 3, [1, 3, 9], id="arrived-is-better"),
    ],
)
def test_search(ends, best, tried):
    rows, calls = rows_of(**ends), []

    def measure(rate, behind):
        calls.append(rate)
        assert behind == min((rows[r]["samples"] or math.inf for r in calls[:-1]), default=math.inf)
        return rows[rate]

    assert search(1.0, measure) == best
    assert calls == tried


def test_diverged_is_worst():
    one = {"samples": None, "stopped": "diverged", "quality": [[16, 0.1]]}
    other = {"samples": None, "stopped": "budget", "quality": [[16, 9.0]]}
    assert better(other, one) and not better(one, other) and better(one, None)


class Line(nn.Module):
    """y = w x, learned from y = 2 x."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))

    def forward(self, x):
        class Output:
            loss = (self.weight * x - 2 * x).square().mean()

        return Output


def line(target=0.1, budget=400):
    def batches(seed, batch):
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield {"x": 1 + torch.rand(batch, 1, generator=generator)}

    def quality(model):
        return abs(float(model.weight.detach()) - 2)

    return Task(lambda seed: Line(), batches, quality, target, lambda batch: budget, lambda batch: 2)


def test_a_run_ends_at_its_target_its_budget_or_behind():
    reached = run(line(), Cell("bf16", "sgd", 4), 0.03, 0)
    assert reached["stopped"] == "reached" and reached["samples"] == reached["quality"][-1][0]
    assert reached["quality"][-1][1] <= 0.1 < reached["quality"][-2][1] and reached["samples"] % 8 == 0
    slow = run(line(), Cell("bf16", "sgd", 4), 1e-4, 0)
    assert (slow["stopped"], slow["samples"], slow["quality"][-1][0]) == ("budget", None, 400)
    assert run(line(), Cell("bf16", "sgd", 4), 1e-4, 0, behind=16)["quality"][-1][0] == 16
    assert run(line(), Cell("bf16", "sgd", 4), 1e30, 0)["stopped"] == "diverged"


def test_a_batch_in_parts_has_the_gradient_of_the_whole(monkeypatch):
    batch = {"x": 1 + torch.rand(7, 1, generator=torch.Generator().manual_seed(0))}
    found = []
    for parts in (7, 3):
        monkeypatch.setattr(batch_sweep, "MICRO", parts)
        model = Line()
        found.append((backward(model, batch), float(model.weight.grad)))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_sweep_continues_and_other_seeds_have_the_best_rate(tmp_path):
    plan, seeds = cells(["bf16"], ["sgd"], [2, 4], "line"), (0, 1)
    record = Record("sweep", {}, folder=tmp_path, timed=False)
    assert not sweep(record, line(), plan, seeds, deadline=0)
    assert record.rows == {}
    assert sweep(record, line(), plan, seeds, deadline=math.inf)
    rows = dict(record.rows)
    for cell in plan:
        rate = chosen(rows, cell)
        counts = samples_of(rows, cell, seeds)
        assert len(counts) == 2 and counts[0] == min(
            row["samples"] or math.inf for key, row in rows.items() if key.startswith(f"line/bf16/sgd/{cell.batch}/")
            and key.endswith("seed0")
        )  # fmt: skip
        # the neighbours were tried
        for factor in (3, 1 / 3):
            assert cell.key(float(f"{rate * factor:.3g}"), 0) in rows
    again = Record("sweep", {}, folder=tmp_path, timed=False)
    assert sweep(again, line(), plan, seeds, deadline=0) and again.rows == rows
    assert len(summary(rows, plan, seeds).splitlines()) == 3


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_the_text_task_under_direct_updates(optimizer):
    task = large_batch.task()
    found = run(task, Cell("dqt-8", optimizer, 16), batch_sweep.OPTIMIZERS[optimizer][1], 0, behind=256)
    # one evaluation, after 16 steps; 5.5 is that of uniform bytes
    assert found["stopped"] == "behind" and found["quality"][0][1] < 5.5 and found["changed_rate"] > 0


def idx(*sizes):
    """An IDX file of bytes that count up."""
    header = bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes)
    return gzip.compress(header + bytes(i % 251 for i in range(math.prod(sizes))))


@pytest.fixture
def pictures(tmp_path):
    for part, count in (("train", 40), ("t10k", 3)):
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(count, 28, 28))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(count))
    return tmp_path


def test_pictures_are_read_as_they_are_stored(pictures):
    found, labels = images.load("t10k", pictures)
    assert found.shape == (3, 1, 28, 28) and labels.tolist() == [0, 1, 2] and labels.dtype == torch.int64
    # the second row of the second picture begins with byte number 784 + 28
    assert float(found[1, 0, 1, 0]) == pytest.approx(((812 % 251) / 255 - images.MEAN) / images.DEVIATION)
    (pictures / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x0d\x01aaaa"))
    with pytest.raises(ValueError, match="no IDX file of bytes"):
        images.load("t10k", pictures)


@pytest.mark.parametrize(("name", "way"), [("vit", "dqt-8"), ("resnet", "bf16")])
def test_vision_tasks(name, way, pictures, monkeypatch):
    monkeypatch.setattr(vision, "VALIDATION", 8)
    data, labels = images.load("train", pictures)
    task = vision.task(name, data, labels % 10)
    found = run(task, Cell(way, "lars", 16, name), 1.0, 0, behind=16)
    assert found["stopped"] in ("behind", "reached") and 0 <= found["quality"][0][1] <= 1
    # an epoch of 32 pictures is two batches, and no picture comes twice
    batches = task.batches(0, 16)
    seen = [picture for batch in (next(batches), next(batches)) for picture in batch["pixel_values"][:, 0, 0, 0]]
    assert len(seen) == 32 == len({float(picture) for picture in seen})


def test_label_smoothing_is_in_the_loss():
    model = lambda pixel_values: type("Output", (), {"logits": pixel_values})  # noqa: E731
    batch = {"pixel_values": torch.tensor([[30.0, 0, 0, 0, 0, 0, 0, 0, 0, 0]]), "labels": torch.tensor([0])}
    # certain and right: a tenth of the weight, spread over ten classes, still costs 30 nats for nine of them
    assert float(vision.smoothed(model, batch)) == pytest.approx(0.1 * 0.9 * 30, rel=1e-3)
