"""Low-bit linear layers: `LowBitLinear` for `nn.Linear`, `LowBitConv1D` for GPT-2's `Conv1D` (weight [K, N])."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..functional.linear import is_watched, linear, linear_now
from ..functional.packing import not_codes
from .packed import LowBitModule
from .sharing import FEWEST_ROWS, take_product


def packed_linear(module: LowBitModule, x: Tensor) -> Tensor:
    """x [..., K] -> [..., N] with the module's packed `weight`; the product may have been computed already, see
    sharing.py."""
    run, product, parameters = linear, module.lowbit["weight"].product, module._parameters
    if parameters["weight"].dtype is not torch.int8:
        raise not_codes(parameters["weight"])
    if type(x) is Tensor and not torch.is_grad_enabled() and not is_watched():
        if x.is_cpu and not torch.is_autocast_enabled("cpu"):
            if x.numel() >= FEWEST_ROWS * product[1]:
                y = take_product(module, x)
                if y is not None:
                    return y
            run = linear_now
    return run(
        x, parameters["weight"], parameters["weight_scale"], parameters["weight_zero_point"], parameters["bias"],
        *product,
    )  # fmt: skip


class LowBitLinear(LowBitModule, nn.Linear):
    """`nn.Linear` with packed weight. A subclass, since PEFT and transformers look for it."""

    def forward(self, input: Tensor) -> Tensor:
        return packed_linear(self, input)


class LowBitConv1D(LowBitModule, Conv1D):
    """GPT-2's `Conv1D` with packed weight, stored as a linear layer's."""

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(self, x)


class FlatLinear(nn.Linear):
    """A dense linear layer that flattens its input to 2-D.

    The output layer that stays dense is called on `hidden[:, -1:, :]`, whose strides send torch's bf16 product on CPU
    through a copy of the whole weight.
    """

    def forward(self, input: Tensor) -> Tensor:
        y = nn.functional.linear(input.reshape(-1, input.shape[-1]), self.weight, self.bias)
        return y.view(*input.shape[:-1], y.shape[-1])
