"""Tiny byte-level Llamas that are trained from nothing, under each way to hold a weight, by the real Trainer.

Text: Austen as bytes. Train: Emma, Sense and Sensibility. Learning rates are chosen on Northanger Abbey; figures are
of Persuasion, which decides nothing. Every method sees the same batches of a seed, the same schedule (cosine, a
tenth of it warmup), clipping at 1 and no weight decay; only the learning rate is its own.

The baseline `bitnet` is BitNet b1.58 as published (Ma et al. 2024): a float weight that the optimizer sees, of which
the forward pass takes the ternary form (straight-through), with int8 activations.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

import hf_lowbit as lb
from benchmarks.perplexity import CALIBRATION, novel, window_nlls
from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.functional.linear import quantize_activations
from hf_lowbit.training import leaves


CONTEXT, BATCH = 128, 8
SIZES = {
    "0.3M": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4},
    "1M": {"hidden_size": 160, "intermediate_size": 448, "num_hidden_layers": 4, "num_attention_heads": 5},
}
# method -> (fields of DQTConfig or None, round to nearest instead of stochastically)
METHODS = {
    "fp32": (None, False),
    "bitnet": (None, False),
    "dqt-8": ({"bits": 8}, False),
    "dqt-8-ternary-forward": ({"bits": 8, "forward_bits": "ternary"}, False),
    "dqt-4": ({"bits": 4}, False),
    "dqt-ternary": ({"bits": "ternary"}, False),
    "dqt-ternary-learned-scale": ({"bits": "ternary", "scale": "learned"}, False),
    "dqt-8-nearest": ({"bits": 8}, True),
    "dqt-ternary-nearest": ({"bits": "ternary"}, True),
}


@dataclass(frozen=True)
class Run:
    """One training run."""

    size: str
    method: str
    rate: float
    steps: int
    seed: int

    @property
    def key(self) -> str:
        return f"{self.size}/{self.steps}/{self.method}/{self.rate:g}/seed{self.seed}"


class Windows(Dataset):
    """Windows of a text at places that the seed draws: the same for every method."""

    def __init__(self, data: Tensor, count: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.data = data
        self.starts = torch.randint(len(data) - CONTEXT - 1, (count,), generator=generator).tolist()

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        ids = self.data[self.starts[index] : self.starts[index] + CONTEXT].long()
        return {"input_ids": ids, "labels": ids}


def as_bytes(names) -> Tensor:
    return torch.frombuffer(bytearray("".join(novel(n) for n in names).encode()), dtype=torch.uint8)


def held_out(name: str, count: int) -> Tensor:
    return as_bytes([name])[: count * CONTEXT].view(count, CONTEXT).long()


class AbsmeanTernary(nn.Module):
    """The ternary form of a float weight, gradients straight through."""

    def forward(self, weight: Tensor) -> Tensor:
        scale = weight.detach().abs().mean().clamp(min=1e-5)
        rounded = (weight.detach() / scale).round().clamp(-1, 1) * scale
        return weight + (rounded - weight).detach()


def bitnet(model: nn.Module) -> nn.Module:
    """BitNet b1.58 in place: the linear layers of the blocks, as DQTConfig converts them."""

    def round_input(module, inputs):
        x = inputs[0]
        codes, scale = quantize_activations(x.detach())
        return (x + ((codes.float() * scale).view_as(x) - x).detach(),)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            parametrize.register_parametrization(module, "weight", AbsmeanTernary())
            module.register_forward_pre_hook(round_input)
    return model


@contextmanager
def nearest():
    """Round steps to nearest: what a direct update would be without noise."""
    stochastic = leaves.round_step
    leaves.round_step = lambda step, noise: step.round()
    try:
        # torch's operations: a fused kernel rounds by itself
        with use_kernel("reference"):
            yield
    finally:
        leaves.round_step = stochastic


def build(size: str, method: str, seed: int, fields: dict | None = None) -> nn.Module:
    """A new model; `fields` of DQTConfig instead of the method's own."""
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES[size], vocab_size=256, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
                         pad_token_id=None, bos_token_id=None, eos_token_id=None)  # fmt: skip
    model = LlamaForCausalLM(config)
    if method == "bitnet":
        return bitnet(model)
    fields = METHODS[method][0] if fields is None else fields
    return model if fields is None else lb.quantize(model, lb.DQTConfig(**fields))


def train(
    run: Run, data: Tensor, fields: dict | None = None, batch: int = BATCH, **callback_fields
) -> tuple[nn.Module, list[dict]]:
    """The trained model and the Trainer's logs. `fields` of DQTConfig instead of those of the method."""
    model = build(run.size, run.method, run.seed, fields)
    own_fields, to_nearest = METHODS.get(run.method, (None, False))
    fields = own_fields if fields is None else fields
    callbacks = [] if fields is None else [lb.DQTCallback(**callback_fields)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=run.steps, per_device_train_batch_size=batch, learning_rate=run.rate,
            lr_scheduler_type="cosine", warmup_steps=run.steps // 10, max_grad_norm=1.0, use_cpu=True, seed=run.seed,
            save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=max(1, run.steps // 10),
            log_level="error", optim="adamw_torch", weight_decay=0.0,
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=Windows(data, run.steps * batch, run.seed),
                          callbacks=callbacks)  # fmt: skip
        # the Trainer prints every log entry unless it shows progress; the record keeps them
        from transformers.trainer_callback import PrinterCallback

        trainer.remove_callback(PrinterCallback)
        if to_nearest:
            with nearest():
                trainer.train()
        else:
            trainer.train()
    return model, [entry for entry in trainer.state.log_history if "loss" in entry]


def loss(model: nn.Module, batch: Tensor) -> list[float]:
    """Mean NLL of each window, in nats a byte."""
    logging.set_verbosity_error()
    return list(window_nlls(model, batch))


def train_text() -> Tensor:
    return as_bytes(CALIBRATION)
