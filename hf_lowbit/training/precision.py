"""Which numbers a training run multiplies, in the words that MLPerf's rules have for them.

MLPerf 6.1 asks for the lowest precision in linear layers, attention and communication. What counts is what is
executed, not what is stored: ternary weights that are unpacked to bfloat16 and multiplied there are `bfloat16`, and
those times int8 activations are `int8`. How weights are stored is said beside it, in a key of ours (`weight_formats`).
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..nn.packed import LowBitModule


WORDS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bfloat16", torch.float16: "fp16"}
# the lowest last
ORDER = ("fp64", "fp32", "tf32", "fp16", "bfloat16", "int8")
PARTS = ("linear", "attn", "comm")


def executed_precision(model: nn.Module, args) -> dict[str, str]:
    """{"linear", "attn", "comm"} -> word, for a model trained under TrainingArguments `args`.

    Gradients travel in their parameters' dtype, which autocast does not change; a communication hook does, and can't
    be seen from here.
    """
    autocast = "bfloat16" if args.bf16 else "fp16" if args.fp16 else None
    products, gradients = set(), set()
    for module in model.modules():
        if isinstance(module, LowBitModule) and module.lowbit:
            if any(packed.scheme.activations == "int8" for packed in module.lowbit.values()):
                products.add("int8")
            products.add(autocast or _word(getattr(model, "dtype", torch.float32)))
        elif isinstance(module, (nn.Linear, nn.modules.conv._ConvNd, Conv1D)):
            products.add(autocast or _float32_word(_word(module.weight.dtype), module.weight.device))
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in WORDS:
            gradients.add(_word(parameter.dtype))
    whole = autocast or _word(getattr(model, "dtype", torch.float32))
    return {"linear": _lowest(products or {whole}), "attn": whole, "comm": _lowest(gradients or {whole})}


def weight_formats(model: nn.Module) -> str:
    """How weights are stored: "ternary", "8 bits", "float32", several with commas."""
    found = set()
    for module in model.modules():
        if isinstance(module, LowBitModule) and module.lowbit:
            for packed in module.lowbit.values():
                bits = packed.scheme.bits
                found.add(bits if isinstance(bits, str) else f"{bits} bits")
        elif isinstance(module, (nn.Linear, Conv1D)):
            found.add(str(module.weight.dtype).removeprefix("torch."))
    return ", ".join(sorted(found))


def _word(dtype: torch.dtype) -> str:
    return WORDS.get(dtype, "fp32")


def _float32_word(word: str, device: torch.device) -> str:
    """TensorFloat-32 is what float32 products are on a GPU that was told so."""
    tf32 = word == "fp32" and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 else word


def _lowest(words: set[str]) -> str:
    return max(words, key=ORDER.index)
