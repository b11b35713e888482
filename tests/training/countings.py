"""A task that a tiny model solves in a second: continue (start + 5 k) mod 64. Trainer runs for the log's tests."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from tests.training.runs import arguments


LENGTH, TARGET = 12, 0.5


class Countings(Dataset):
    """`count` sequences, each of another start."""

    def __init__(self, count: int = 600, shift: int = 0):
        self.ids = (torch.arange(count)[:, None] + shift + 5 * torch.arange(LENGTH)) % 64

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def build(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, max_position_embeddings=LENGTH, pad_token_id=None, bos_token_id=None,
                         eos_token_id=None)  # fmt: skip
    return LlamaForCausalLM(config)


def run(folder, callback, *callbacks, model=None, train=None, evaluation=None, **fields) -> Trainer:
    """Train until the callback stops it, or for 200 steps."""
    given = {"max_steps": 200, "per_device_train_batch_size": 32, "learning_rate": 3e-3, "eval_strategy": "steps",
             "eval_steps": 20, "logging_steps": 100, **fields}  # fmt: skip
    trainer = Trainer(model=model or build(), args=arguments(folder, **given), train_dataset=train or Countings(),
                      eval_dataset=evaluation or Countings(64, 7), callbacks=[callback, *callbacks])  # fmt: skip
    trainer.train()
    return trainer
