"""`resize_token_embeddings` on low-bit tables, and the bias of a low-bit output layer that is tied to one.

transformers reads the vocabulary size off `weight.shape`, which packed weights do not have. So the tables become dense
for the resize and are packed again with their scheme; rows that were there before keep their codes.
"""

from __future__ import annotations

from functools import wraps

from torch import nn
from transformers import PreTrainedModel

from ..nn.packed import LowBitModule, PackedWeight
from ..nn.swap import convert, flatten_head, restore_dense
from ..nn.targets import Target, candidates


def install_resize() -> None:
    """Wrap `PreTrainedModel.resize_token_embeddings`; calling it again changes nothing."""
    plain = PreTrainedModel.resize_token_embeddings
    if getattr(plain, "_hf_lowbit", False):
        return

    @wraps(plain)
    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, *args, **kwargs):
        before = _tables(self)
        if not before or (new_num_tokens is None and pad_to_multiple_of is None):
            return plain(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)
        stored = {key: _stored(module) for key, module in before.items()}
        schemes = {key: module.lowbit["weight"].scheme for key, module in before.items()}
        restore_dense(before.values(), self.dtype)
        plain(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)
        after = {key: _module(self, key) for key in before}
        convert(_targets(self, after, schemes))
        for key, module in after.items():
            _keep_rows(module, stored[key])
        flatten_head(self)
        return self.get_input_embeddings()

    resize_token_embeddings._hf_lowbit = True
    PreTrainedModel.resize_token_embeddings = resize_token_embeddings
    adjust = getattr(PreTrainedModel, "_adjust_bias", None)
    if adjust is None:
        return

    @wraps(adjust)
    def _adjust_bias(self, output_embeddings, input_embeddings):
        # transformers fits the bias of a tied output layer to `weight.shape[0]`, which is 1 for packed weights
        if not isinstance(output_embeddings, LowBitModule):
            adjust(self, output_embeddings, input_embeddings)

    PreTrainedModel._adjust_bias = _adjust_bias


def _module(model: PreTrainedModel, key: str) -> nn.Module:
    return model.get_input_embeddings() if key == "input" else model.get_output_embeddings()


def _tables(model: PreTrainedModel) -> dict[str, LowBitModule]:
    """The low-bit ones of the input ("input") and output ("output") embeddings."""
    tables = {"input": model.get_input_embeddings(), "output": model.get_output_embeddings()}
    return {key: module for key, module in tables.items() if isinstance(module, LowBitModule)}


def _targets(model: PreTrainedModel, modules: dict[str, nn.Module], schemes: dict) -> list[Target]:
    wanted = {id(module): schemes[key] for key, module in modules.items()}
    targets = [target for target in candidates(model) if id(target.module) in wanted]
    for target in targets:
        target.packed = PackedWeight(wanted[id(target.module)], target.shape, target.transposed)
    return targets


def _stored(module: LowBitModule) -> dict:
    return {suffix: module._parameters["weight" + suffix].detach() for suffix in module.lowbit["weight"].tensors()}


def _keep_rows(module: LowBitModule, old: dict) -> None:
    """Give the rows that were there before their old codes back; a scale for the whole tensor admits no mixture."""
    if module.lowbit["weight"].scheme.group_size == "tensor":
        return
    rows = min(old["_scale"].shape[0], module._parameters["weight_scale"].shape[0])
    for suffix, tensor in old.items():
        new = module._parameters["weight" + suffix].detach()
        new[..., :rows, :].copy_(tensor[..., :rows, :])
