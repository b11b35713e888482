"""`QuantizeOp`: rounding the tensors of a dense checkpoint one at a time, while transformers loads it."""

from __future__ import annotations

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps

from ..nn.swap import quantize
from ..nn.targets import Target


class QuantizeOp(ConversionOps):
    """transformers' load operation that rounds and packs the tensors of one parameter as they arrive."""

    def __init__(self, targets: dict[str, Target], failures: dict[str, str]):
        self.targets, self.failures = targets, failures

    def convert(self, input_dict, full_layer_name=None, **kwargs):
        stored = {}
        for name, value in input_dict.items():
            name = name if name in self.targets else full_layer_name
            value = value[0] if isinstance(value, list) else value
            if name not in self.targets:
                stored[name] = value
                continue
            try:
                parts = quantize(self.targets[name], value)
            except ValueError as error:
                # transformers would turn it into a report without the sentence: it is raised when loading has ended
                self.failures[name] = str(error)
                parts = quantize(self.targets[name], torch.zeros_like(value))
            for suffix, tensor in parts.items():
                stored[name + suffix] = nn.Parameter(tensor, requires_grad=False)
        return stored
