"""Trainable low-bit layers: the packed tensors of a low-bit layer behind a parameter that receives gradients.

`arm` turns a low-bit layer into its trainable form and `disarm` back, both in place and without touching a code
(unless the forward pass is coarser than the codes: then `disarm` packs what the forward pass multiplied with).

A trainable module's `weight` is a `CodesParameter`. Its state dict, and so every checkpoint, holds the plain tensors
of the stored codes, under the same names as a low-bit layer's. Without gradients the forward pass is that of the
low-bit layer which `disarm` would make, bit for bit.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..configs.scheme import Scheme
from ..functional.grid import TERNARY, dequantize, grid_of
from ..functional.linear import linear
from ..functional.packing import pack
from ..functional.trainable import Form, forward_codes, trainable_linear
from .packed import LowBitModule, PackedWeight, install
from .slot import CodesParameter, make_parameter


@dataclass(frozen=True)
class Training:
    """How a module's codes are trained: a coarser forward ("ternary") or None, and whether scales are learned."""

    forward_bits: str | None = None
    learned_scale: bool = False


class TrainableModule(LowBitModule):
    """Mixin of the trainable layers: one packed weight, named `weight`."""

    training_form: Training

    @property
    def form(self) -> Form:
        """What the product needs to know to read the stored bytes."""
        form = self.__dict__.get("_form")
        if form is None:
            packed, scheme = self.lowbit["weight"], self.lowbit["weight"].scheme
            coarse = self.training_form.forward_bits == TERNARY
            form = Form(scheme.bits, packed.in_features, scheme.block, coarse, scheme.activations == "int8",
                        packed.transposed)  # fmt: skip
            self.__dict__["_form"] = form
        return form

    def stored(self, name: str = "weight") -> Tensor:
        return self._parameters[name].stored

    def forward_packed(self) -> PackedWeight:
        """How the weight is packed that the forward pass multiplies with."""
        return forward_packed(self.lowbit["weight"], self.training_form)

    def forward_tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stored bytes, scale and zero point that the forward pass multiplies with. A coarser form is kept until the
        codes change."""
        stored, scale = self.stored(), self._parameters["weight_scale"].detach()
        zero_point = self._parameters["weight_zero_point"]
        if not self.form.ternary_forward:
            return stored, scale, zero_point
        version = (id(stored), stored._version, scale._version) if not stored.is_inference() else None
        kept = self.__dict__.get("_coarse")
        if version is None or kept is None or kept[0] != version:
            codes, gamma, _ = forward_codes(stored.view(stored.shape[-2:]), scale, None, self.form)
            kept = (version, pack(codes, grid_of(TERNARY)).unsqueeze(0), gamma)
            # under the tracer nothing may outlive the call
            if not torch.compiler.is_compiling():
                self.__dict__["_coarse"] = kept
        return kept[1], kept[2], None

    def dense_weight(self, name: str = "weight", dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that the forward pass multiplies with, in the dense shape and orientation."""
        form, stored = self.form, self.stored()
        codes, scale, zero_point = forward_codes(
            stored.view(stored.shape[-2:]), self._parameters["weight_scale"].detach(),
            self._parameters["weight_zero_point"], form,
        )  # fmt: skip
        dense = dequantize(codes, scale, zero_point, form.group_size, dtype)
        return dense.t().contiguous() if form.transposed else dense

    def relink(self) -> None:
        """Let the weight read the scale that the module holds now."""
        weight, scale = self._parameters["weight"], self._parameters["weight_scale"]
        weight.scale, weight.zero_point = scale.detach(), self._parameters["weight_zero_point"]
        # what tells an optimizer that this parameter is moved by factors
        scale._hf_lowbit_scale = True

    @contextmanager
    def plain(self):
        """The module with its stored bytes as the `weight`, as a low-bit layer has them."""
        slot = self._parameters["weight"]
        self.__dict__.pop("_coarse", None)
        self._parameters["weight"] = nn.Parameter(slot.stored, requires_grad=False)
        try:
            yield slot
        finally:
            held = self._parameters["weight"].detach()
            if held.data_ptr() != slot.stored.data_ptr() or held.device != slot.stored.device:
                slot.stored = held
            self._parameters["weight"] = slot
            self.relink()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        with self.plain():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args, **kwargs):
        with self.plain():
            super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn, recurse=True):
        probe = fn(torch.empty(0, dtype=self._parameters["weight"].dtype, device=self._parameters["weight"].device))
        with self.plain() as slot:
            super()._apply(fn, recurse)
        if (probe.dtype, slot.stored.device) != (slot.dtype, slot.device):
            moved = make_parameter(slot.stored, slot.scale, slot.zero_point, slot.packed, probe.dtype,
                                   slot.requires_grad)  # fmt: skip
            moved.grad = None if slot.grad is None else fn(slot.grad)
            self._parameters["weight"] = moved
        return self

    def __setstate__(self, state):
        super().__setstate__(state)
        # copies and unpickled modules have two copies of a scale: one in the weight
        self.relink()

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "_coarse"}


def trainable_forward(module: TrainableModule, x: Tensor) -> Tensor:
    """x [..., K] -> [..., N]: with gradients to the codes where they are wanted, else as the frozen layer would."""
    parameters = module._parameters
    weight, scale, bias = parameters["weight"], parameters["weight_scale"], parameters["bias"]
    form = module.form
    if not isinstance(weight, CodesParameter):
        raise ValueError(
            f"the weight of a trainable low-bit layer was replaced by a {type(weight).__name__}, as FSDP does: packed "
            "weights can't be sharded. Train with DDP, and `shard_states`=True to share out gradients and states."
        )
    if torch.is_grad_enabled() and (weight.requires_grad or scale.requires_grad):
        return trainable_linear(x, weight, weight.stored, scale, parameters["weight_zero_point"], bias, form)
    stored, scale, zero_point = module.forward_tensors()
    bits = TERNARY if form.ternary_forward else form.bits
    return linear(x, stored, scale, zero_point, bias, bits, form.in_features, form.group_size, form.int8_activations)


class TrainableLinear(TrainableModule, nn.Linear):
    """`nn.Linear` whose weight is low-bit codes that are trained."""

    def forward(self, input: Tensor) -> Tensor:
        return trainable_forward(self, input)


class TrainableConv1D(TrainableModule, Conv1D):
    """GPT-2's `Conv1D` whose weight is low-bit codes that are trained."""

    def forward(self, x: Tensor) -> Tensor:
        return trainable_forward(self, x)


def forward_packed(packed: PackedWeight, training: Training) -> PackedWeight:
    """The packed form that the forward pass of a trainable weight stands for."""
    if training.forward_bits is None:
        return packed
    scheme = packed.scheme
    return replace(
        packed, scheme=Scheme(training.forward_bits, scheme.group_size, True, scheme.activations, scheme.scales)
    )


def hold_codes(module: TrainableModule, training: Training, dtype: torch.dtype) -> None:
    """Put the packed tensors of a module, whose class is a trainable one already, behind a parameter."""
    module.training_form = training
    scale, packed = module._parameters["weight_scale"], module.lowbit["weight"]
    scale.requires_grad_(training.learned_scale)
    stored, zero_point = module._parameters["weight"].detach(), module._parameters["weight_zero_point"]
    module.__dict__.pop("_form", None)
    module._parameters["weight"] = make_parameter(stored, scale.detach(), zero_point, packed, dtype)
    module.relink()


def release_codes(module: TrainableModule) -> None:
    """Put the packed tensors of the forward pass back as plain parameters; the class is the caller's to change."""
    stored, scale, zero_point = module.forward_tensors()
    tensors = {"": stored.detach(), "_scale": scale.detach()}
    if zero_point is not None:
        tensors["_zero_point"] = zero_point.detach()
    packed = module.forward_packed()
    for key in ("training_form", "_form", "_coarse"):
        module.__dict__.pop(key, None)
    install(module, "weight", packed, tensors)
