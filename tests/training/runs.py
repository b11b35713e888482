"""What the training tests share: a tiny Llama, data, arguments of the real Trainer, and a full snapshot of a model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import TrainingArguments

import hf_lowbit as lb
from hf_lowbit.training.updater import direct_parameters
from tests.processes import save
from tests.quantizers.architectures import BY_ID, VOCABULARY


# the paper's mode: stored 8 bits, ternary forward
TERNARY_FORWARD = {"bits": 8, "forward_bits": "ternary"}
MODES = {
    "8": {"bits": 8},
    "8-ternary-forward": TERNARY_FORWARD,
    "8-learned-scale": {**TERNARY_FORWARD, "scale": "learned"},
    "4-groups": {"bits": 4, "group_size": 32},
    "3": {"bits": 3},
    "2-tensor": {"bits": 2, "group_size": "tensor"},
    "ternary": {"bits": "ternary"},
}


class Sentences(Dataset):
    """Sixteen sentences of random words; `shift` makes other ones."""

    def __init__(self, shift: int = 0, count: int = 16):
        generator = torch.Generator().manual_seed(shift)
        self.ids = torch.randint(3, VOCABULARY, (count, 7), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def model(architecture: str = "llama", **fields):
    """A trainable model of the zoo, always with the same numbers."""
    return lb.quantize(BY_ID[architecture].build(), lb.DQTConfig(**(fields or TERNARY_FORWARD)))


def arguments(folder, **fields) -> TrainingArguments:
    given = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "use_cpu": True, "seed": 1,
             "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 1}  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**given, **fields})


def snapshot(module) -> dict[str, torch.Tensor]:
    """Every stored tensor: codes, scales, floats."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def different(one: dict, other: dict) -> list[str]:
    """Names of the tensors that are not equal bit for bit."""
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def accelerate_loop(folder, check, epochs=1, **options):
    """accelerate's own loop, with accumulation and clipping, and its own way to save; `check` is called with the model
    and our optimizer before it saves. What is loaded again must be what was there."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    made = model()
    optimizer = lb.DQTOptimizer(made, lr=2e-3, state_bits=8, **options)
    wrapped, optimizer, loader = accelerator.prepare(made, optimizer, DataLoader(Sentences(), batch_size=2))
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    check(made, optimizer.optimizer)
    accelerator.save_state(str(Path(folder) / "state"))
    accelerator.wait_for_everyone()
    before = snapshot(made)
    for _, parameter in direct_parameters(made):
        parameter.stored.zero_()
    accelerator.load_state(str(Path(folder) / "state"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(made).items())
    save(folder, "accelerate", {"model": before, "steps": optimizer.optimizer.updater.state["step"]})
