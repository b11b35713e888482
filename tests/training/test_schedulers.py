"""Every scheduler of transformers in the real Trainer: the rate that moves the codes is the one that a plain optimizer
would get from it, step by step."""

import pytest
import torch
from transformers import SchedulerType, Trainer, get_scheduler

import hf_lowbit as lb
from tests.training.runs import Sentences, arguments, model


RATE, STEPS, WARMUP = 3e-3, 6, 2
# what a scheduler needs beside warmup and the number of steps, and what of it is optional
EXTRA = {
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"lr_end": 1e-4, "power": 2.0},
    "inverse_sqrt": {"timescale": 3},
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.2, "warmup_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 2, "decay_type": "linear", "min_lr_ratio": 0.1},
}
# these look at a metric, not at the step
BY_METRIC = {"reduce_lr_on_plateau", "greedy"}
BY_STEP = [kind.value for kind in SchedulerType if kind.value not in BY_METRIC]
NEEDED = {"cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"}
CASES = [(kind, {}) for kind in BY_STEP if kind not in NEEDED] + [(k, v) for k, v in EXTRA.items() if k in BY_STEP]


def rates_of_plain_optimizer(kind: str, extra: dict) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = get_scheduler(kind, optimizer, WARMUP, STEPS, scheduler_specific_kwargs=extra)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


class Watching(lb.DQTCallback):
    """Notes the rate that each step moves the codes with."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def _rates(self, leaf):
        rate, decay = super()._rates(leaf)
        if leaf.name.endswith("0.self_attn.q_proj.weight"):
            self.rates.append(rate)
        return rate, decay


def train(folder, kind, extra, **fields):
    callback = Watching()
    args = arguments(folder, lr_scheduler_type=kind, lr_scheduler_kwargs=extra, learning_rate=RATE, max_steps=STEPS,
                     **fields)  # fmt: skip
    data = {"train_dataset": Sentences(), "eval_dataset": Sentences(9)}
    trainer = Trainer(model=model(), args=args, callbacks=[callback], **data)
    trainer.train()
    return callback, [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("kind", "extra"), CASES, ids=lambda case: case if isinstance(case, str) else ",".join(case))
def test_codes_move_at_the_rate_of_a_plain_optimizer(kind, extra, tmp_path):
    callback, logs = train(tmp_path, kind, extra, warmup_steps=WARMUP)
    expected = rates_of_plain_optimizer(kind, extra)
    assert callback.rates == pytest.approx(expected, rel=1e-12)
    for rate, entry in zip(expected, logs, strict=True):
        assert (entry["dqt/changed_rate"] > 0) == (rate > 0)


def test_a_rate_that_falls_on_a_plateau_is_followed(tmp_path):
    """The metric is the loss of an evaluation; one that does not improve by a thousand nats lowers the rate."""
    extra = {"factor": 0.1, "patience": 0, "threshold": 1e3, "threshold_mode": "abs"}
    callback, _ = train(
        tmp_path, "reduce_lr_on_plateau", extra, eval_strategy="steps", eval_steps=2, metric_for_best_model="loss"
    )
    # the first evaluation is the best so far; the second, after step 4, is not better
    assert callback.rates == pytest.approx([RATE] * 4 + [0.1 * RATE] * 2)


@pytest.mark.skipif("greedy" not in {kind.value for kind in SchedulerType}, reason="an older transformers")
def test_the_greedy_scheduler_is_followed(tmp_path):
    """It sets the rate itself, from the losses of evaluations: what it sets is what moves the codes."""
    callback, logs = train(tmp_path, "greedy", {}, eval_strategy="steps", eval_steps=2, metric_for_best_model="loss")
    assert len(callback.rates) == STEPS and callback.rates[0] == RATE
    assert all(entry["dqt/changed_rate"] > 0 for entry in logs)
