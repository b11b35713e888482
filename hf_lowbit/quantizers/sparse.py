"""`BlastQuantizer`: what transformers calls while it loads and saves a block-sparse model.

A dense checkpoint loads as it is, into layers that can be pruned. A checkpoint of live blocks is checked against its
own config and the model before anything is allocated, then loaded into place; passing a `BlastConfig` for it lets its
layers be pruned further.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..configs.blast import BlastConfig, BlockLayout, kept_blocks
from ..configs.lowbit import FORMAT_VERSION, LowBitConfig
from ..functional.block_masks import best_blocks, block_scores
from ..nn.block_sparse import BlockModule, block_tensors
from ..nn.masked import MaskedModule
from ..nn.names import first_match
from ..nn.sparse_targets import KINDS, find_sparse_targets
from ..nn.sparsify import (
    become_empty_blocks,
    become_masked,
    clear_module,
    current_layout,
    restore_dense_blocks,
    settle_mask,
    sparse_modules,
    unpack_blocks,
)
from ..nn.targets import Target, candidates
from .checkpoint import _headers, _raise, _spellings, check_shapes
from .quantizer import LowBitQuantizer, refuse_parallel


class BlastQuantizer(LowBitQuantizer):
    """See the module. Raises ValueError for conflicting configs and for what can't be loaded right."""

    quantization_config: BlastConfig

    def validate_environment(self, *args, device_map=None, **kwargs):
        places = device_map.values() if isinstance(device_map, dict) else [device_map]
        if "disk" in places:
            raise ValueError("`device_map` sends block-sparse weights to disk; keep them in memory.")

    def param_element_size(self, model, param_name: str, param) -> float:
        return param.element_size()

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        refuse_parallel(getattr(model.config, "distributed_config", None))
        if self.pre_quantized:
            targets = recorded_layouts(model, self.quantization_config)
            check_stored_blocks(model, targets, checkpoint_files)
            for target, layout in targets:
                if layout.form == "blocks":
                    become_empty_blocks(target.module, target.kind, layout)
                else:
                    # stored with its number of live blocks; how they are balanced is the config's
                    balance = self.quantization_config.balance
                    whole = layout.grid[1] if balance == "row" else layout.blocks
                    layout = replace(layout, balance=balance, live=whole)
                    become_masked(target.module, target.kind, layout, self._target_sparsity(target.name))
        else:
            self.arm(model)
        self._shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        check_shapes(model, self._shapes)
        self._shapes = {}
        check_blocks(model)
        asked = getattr(self.quantization_config, "requested", {}).get("sparse")
        for name, module in list(sparse_modules(model)):
            if isinstance(module, MaskedModule):
                settle_mask(module)
                if not self.pre_quantized and self.quantization_config.one_shot:
                    prune_once(module)
            else:
                for suffix in ("_col_indices", "_row_pointers"):
                    if module._parameters.get("weight" + suffix) is not None:
                        module._parameters["weight" + suffix].requires_grad_(False)
                if asked is not None and not self.quantization_config.dequantize:
                    overrides = asked["overrides"]
                    own = overrides.get(first_match(overrides, name), {})
                    unpack_blocks(module, own.get("sparsity", asked["sparsity"]), asked["balance"])
            module._is_hf_initialized = True
        if asked is not None and not self.quantization_config.dequantize:
            self.quantization_config = _continued(self.quantization_config, asked)
        model._weight_conversions = []
        if self.quantization_config.dequantize:
            self._dequantize(model, None)
            self.remove_quantization_config(model)
            return model
        self.record(model)
        self.postprocess_config(model)
        self.tag(model)
        return model

    def arm(self, model: nn.Module) -> None:
        """Let the dense layers that the config asks for be pruned."""
        for found in find_sparse_targets(model, self.quantization_config):
            become_masked(found.target.module, found.target.kind, found.layout, found.sparsity)

    def record(self, model) -> None:
        """Write which layers are sparse, in which blocks, and what of them is stored: this is what gets saved."""
        self.quantization_config.layouts = {name: current_layout(module) for name, module in sparse_modules(model)}

    def _target_sparsity(self, name: str) -> float:
        config = self.quantization_config
        return config.overrides.get(first_match(config.overrides, name), {}).get("sparsity", config.sparsity)

    def _tags(self) -> list[str]:
        return ["hf_lowbit", "block-sparse"]

    def _tie_companions(self, model, targets) -> None:
        return None

    def _dequantize(self, model, dtype=None):
        dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
        restore_dense_blocks(model.modules(), dtype)
        return model

    def get_state_dict_and_metadata(self, model, *args, **kwargs):
        self.record(model)
        layouts = self.quantization_config.layouts.values()
        blocks = sum(layout.blocks for layout in layouts)
        live = sum(layout.live_blocks for layout in layouts)
        metadata = {
            "hf_lowbit_format_version": str(FORMAT_VERSION),
            "total_parameters": str(model.num_parameters()),
            "block_sparsity": f"{1 - live / max(blocks, 1):.4f}",
        }
        return None, metadata

    @property
    def is_qat_trainable(self) -> bool:
        # a layer that nothing prunes raises in its first training forward; live blocks train like any weight
        return True


def quantizer_for(quantization_config: LowBitConfig, **kwargs) -> LowBitQuantizer:
    """The quantizer of a config of ours, for transformers and for `hf_lowbit.quantize`."""
    cls = LowBitQuantizer if quantization_config.sparse is None else BlastQuantizer
    return cls(quantization_config, **kwargs)


def prune_once(module: MaskedModule) -> None:
    """Keep the best blocks by norm (`one_shot`)."""
    layout = module.layout
    blocks = layout.grid[1] if layout.balance == "row" else layout.blocks
    scores = block_scores(module.oriented(), layout.block)
    module.mask = best_blocks(scores, kept_blocks(module.target, blocks), layout.balance)
    clear_module(module)


def recorded_layouts(model: nn.Module, config: BlastConfig) -> list[tuple[Target, BlockLayout]]:
    """The layers that a checkpoint's config lists, found in the model. Raises ValueError where they do not fit."""
    by_name = {candidate.name: candidate for candidate in candidates(model) if candidate.kind in KINDS}
    same_class = type(model).__name__ in (getattr(model.config, "architectures", None) or [])
    found, problems = [], []
    for name, layout in config.layouts.items():
        target = next((by_name[n] for n in _spellings(name, model) if n in by_name), None)
        if target is None:
            if same_class:
                problems.append(f"`{name}` is listed as block-sparse, but {type(model).__name__} has no such layer")
        elif tuple(target.shape) != layout.shape or target.transposed != layout.transposed:
            problems.append(f"`{name}` is listed with shape {layout.shape}, but the model's is {tuple(target.shape)}")
        else:
            found.append((target, layout))
    if not problems and not found:
        problems = [f"none of the {len(config.layouts)} layers it lists exists in {type(model).__name__}"]
    _raise("the checkpoint's `quantization_config` does not fit the model", problems)
    return found


def check_stored_blocks(model: nn.Module, targets: list[tuple[Target, BlockLayout]], files) -> None:
    """Compare the checkpoint's files with what the layers need. Raises ValueError with every difference."""
    stored: dict[str, tuple] = {}
    for file in files or []:
        if not Path(file).exists():
            raise ValueError(f"`{file}` is missing, though the checkpoint's index names it; fetch it again.")
        stored |= _headers(str(file))
    problems = []
    for target, layout in targets if stored else ():
        dense = {"": (layout.shape, None)}
        for suffix, (shape, dtype) in (block_tensors(layout) if layout.form == "blocks" else dense).items():
            name = target.parameter_name + suffix
            found = next((stored[n] for n in _spellings(name, model) if n in stored), None)
            if found is None:
                problems.append(f"`{name}` is missing")
            elif found[0] != shape or (dtype is not None and found[1] not in ("I32", "torch.int32")):
                problems.append(f"`{name}` is {found[1]} {found[0]}, expected {dtype or 'floats'} {shape}")
    _raise("the checkpoint's tensors do not fit its config", problems)


def check_blocks(model: nn.Module) -> None:
    """Raise ValueError when indices of blocks are out of range, or not ascending within a row."""
    problems = []
    for name, module in sparse_modules(model):
        if not isinstance(module, BlockModule) or module._parameters["weight_col_indices"].device.type == "meta":
            continue
        columns, pointers = module._parameters["weight_col_indices"], module._parameters.get("weight_row_pointers")
        rows, width = module.layout.grid
        if bool(((columns < 0) | (columns >= width)).any()):
            problems.append(f"`{name}` has block columns outside [0, {width})")
            continue
        if pointers is not None:
            ends = int(pointers[0]) == 0 and int(pointers[-1]) == columns.numel()
            if not ends or bool((pointers.diff() < 0).any()):
                problems.append(f"`{name}` has row pointers that do not ascend from 0 to {columns.numel()}")
                continue
            row = torch.arange(rows, device=columns.device).repeat_interleave(pointers.diff().long())
            columns = (row * width + columns.long()).view(1, -1)
        if bool((columns.diff(dim=-1) <= 0).any()):
            problems.append(f"`{name}` has block columns that do not ascend within a row")
    _raise("the checkpoint holds damaged numbers", problems)


def prune_further(model: nn.Module, config: BlastConfig) -> None:
    """Let the sparse layers of a model be pruned to the targets of `config`. Raises ValueError for other blocks."""
    targets = {}
    for name, module in sparse_modules(model):
        own = config.overrides.get(first_match(config.overrides, name), {})
        block = tuple(own.get("block_size", config.block_size))
        if block != module.layout.block:
            raise ValueError(
                f"`block_size`={block} for `{name}`, which has blocks of {module.layout.block}: call "
                "`model.dequantize()` first, or use its blocks."
            )
        targets[name] = own.get("sparsity", config.sparsity)
    for name, module in list(sparse_modules(model)):
        if isinstance(module, BlockModule):
            unpack_blocks(module, targets[name], config.balance)
        module.target = targets[name]
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, BlastQuantizer):
        quantizer.quantization_config = _continued(quantizer.quantization_config, config.sparse)
        quantizer.record(model)
        quantizer.postprocess_config(model)


def _continued(config: BlastConfig, asked: dict) -> BlastConfig:
    """The config of a checkpoint whose layers are pruned further: the new wishes, the stored blocks."""
    continued = BlastConfig(
        asked["sparsity"], tuple(asked["block_size"]), asked["targets"], balance=asked["balance"],
        dense_layers=asked["dense_layers"], overrides=asked["overrides"],
        modules_to_not_convert=config.modules_to_not_convert,
    )  # fmt: skip
    return continued
