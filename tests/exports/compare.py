"""The numbers of an exported model against those of the model it came from."""

import torch

from hf_lowbit.nn.packed import LowBitModule


IDS = torch.arange(3, 43).view(2, 20)


def dense_weights(model, dtype=torch.float32):
    """What the codes of each low-bit module stand for, by name."""
    modules = {name: m for name, m in model.named_modules() if isinstance(m, LowBitModule)}
    return {name: module.dense_weight(dtype=dtype) for name, module in modules.items()}


def logits(model, **inputs):
    with torch.no_grad():
        return model(**(inputs or {"input_ids": IDS})).logits
