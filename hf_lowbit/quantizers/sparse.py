"""`BlastQuantizer`: what transformers calls while it loads and saves a block-sparse model.

A dense checkpoint loads as it is, into layers that can be pruned. A checkpoint of live blocks is checked against its
own config and the model before anything is allocated, then loaded into place; passing a `BlastConfig` for it lets its
layers be pruned further. Layers that are not sparse may be low-bit (`rest`): they are rounded when the blocks are
packed, and loaded as `LowBitQuantizer` loads them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ..configs.blast import BlastConfig, BlockLayout, kept_blocks
from ..configs.lowbit import FORMAT_VERSION, LowBitConfig
from ..functional.block_masks import best_blocks, block_scores
from ..nn.block_sparse import SUFFIXES, BlockWeight
from ..nn.masked_weight import MaskedWeight
from ..nn.names import first_match
from ..nn.packed import LowBitModule
from ..nn.sparse_targets import find_sparse_targets, share_masks
from ..nn.sparsify import (
    become_empty_blocks,
    become_masked,
    clear_module,
    current_layout,
    fuse_gated,
    mask_groups,
    masked_modules,
    pack_blocks,
    place,
    restore_dense_blocks,
    settle_mask,
    sparse_modules,
    unpack_blocks,
)
from ..nn.swap import convert, flatten_head, prepare
from ..nn.targets import Target
from .checkpoint import check_loaded, check_shapes, check_stored, recorded_targets
from .outside import check_inside
from .parts import mark_parts
from .quantizer import LowBitQuantizer, refuse_parallel
from .record import record_modules
from .sparse_checkpoint import check_blocks, check_stored_blocks, recorded_layouts
from .sparse_direct import continue_direct, end_direct, rest_targets, start_direct


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
        check_inside(model, checkpoint_files)
        if self.pre_quantized:
            targets = recorded_layouts(model, self.quantization_config)
            check_stored_blocks(model, targets, checkpoint_files)
            self._load_rest(model, targets, checkpoint_files)
            for target, layout in targets:
                if layout.form == "codes":
                    continue
                if layout.form == "blocks":
                    become_empty_blocks(target.module, target.kind, layout, target.parameter)
                else:
                    aim = self._aim(target.name, layout)
                    become_masked(target.module, target.kind, *aim, target.parameter)
        else:
            self.arm(model)
        self._shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if n not in self._targets}
        return model

    def _load_rest(self, model, blocks: list[tuple[Target, BlockLayout]], files) -> None:
        """Turn the layers that are stored low-bit into ones to load into."""
        rest = self.quantization_config.rest
        if rest is None or not rest.is_resolved:
            return
        targets = recorded_targets(model, rest)
        check_stored(model, targets, files, [t.parameter_name for t, layout in blocks if layout.form != "codes"])
        self._targets = {target.parameter_name: target for target in targets}
        prepare(targets, load_packed=True, device="meta")
        self._tie_companions(model, self._targets)

    def _process_model_after_weight_loading(self, model, **kwargs):
        check_shapes(model, self._shapes)
        for target in self._targets.values():
            self._finish(target)
        check_loaded(self._targets.values())
        if self._targets:
            flatten_head(model)
        self._targets, self._shapes = {}, {}
        if self.pre_quantized:
            continue_direct(model, self.quantization_config, self._aim)
        check_blocks(model)
        asked = getattr(self.quantization_config, "requested", {}).get("sparse")
        for name, module in list(sparse_modules(model)):
            if isinstance(module, MaskedWeight):
                if self.pre_quantized:
                    settle_mask(module)
            else:
                for suffix in SUFFIXES[1:]:
                    if module.held(suffix) is not None:
                        module.held(suffix).requires_grad_(False)
                if asked is not None and not self.quantization_config.dequantize:
                    overrides = asked["overrides"]
                    own = overrides.get(first_match(overrides, name), {})
                    unpack_blocks(module, own.get("sparsity", asked["sparsity"]), asked["balance"])
            place(module)[0]._is_hf_initialized = True
        if asked is not None and not self.quantization_config.dequantize:
            self.quantization_config = _continued(self.quantization_config, asked)
        if self.pre_quantized:
            share_masks(model, self.quantization_config.share_gate_up_mask)
        else:
            if self.quantization_config.one_shot:
                prune_once(model)
            start_direct(model, self.quantization_config)
        model._weight_conversions = []
        if self.quantization_config.dequantize:
            self._dequantize(model, None)
            self.remove_quantization_config(model)
            return model
        fuse_gated(model)
        self.record(model)
        self.postprocess_config(model)
        self.tag(model)
        return model

    def arm(self, model: nn.Module) -> None:
        """Let the dense layers that the config asks for be pruned."""
        for found in find_sparse_targets(model, self.quantization_config):
            target = found.target
            become_masked(target.module, target.kind, found.layout, found.sparsity, target.parameter)
        share_masks(model, self.quantization_config.share_gate_up_mask)
        if self.quantization_config.rest is not None:
            # a pattern that matches nothing is an error now, and not after training
            rest_targets(model, self.quantization_config)

    def pack(self, model) -> None:
        """Keep live blocks only, in their bits, and round the rest: training has ended.

        Raises ValueError, before anything is packed, for NaN or infinity in blocks that are to be rounded.
        """
        broken = [
            f"`{name}`"
            for name, weight in masked_modules(model)
            if weight.layout.bits is not None and not bool(torch.isfinite(weight.oriented()).all())
        ]
        if broken:
            raise ValueError(
                f"the live blocks of {', '.join(broken)} are to be rounded, and the weights hold NaN or infinity: "
                "training has diverged, or the checkpoint is damaged. Nothing was packed."
            )
        for _, module in masked_modules(model):
            pack_blocks(module)
        fuse_gated(model)
        rest = self.quantization_config.rest
        if rest is not None and rest.training is not None:
            self.quantization_config.rest = end_direct(model, rest)
        elif rest is not None and not rest.is_resolved:
            targets = rest_targets(model, self.quantization_config)
            convert(targets)
            flatten_head(model)
            self._tie_companions(model, {target.parameter_name: target for target in targets})
        self.record(model)

    def record(self, model) -> None:
        """Write which layers are sparse, in which blocks, and what of them is stored: this is what gets saved."""
        config = self.quantization_config
        config.layouts = {name: current_layout(module) for name, module in sparse_modules(model)}
        if config.rest is not None and any(isinstance(module, LowBitModule) for module in model.modules()):
            record_modules(model, config.rest)
        mark_parts(model, config)

    def _aim(self, name: str, layout: BlockLayout) -> tuple[BlockLayout, float]:
        """How a layer that is stored dense goes on: its layout (a file says how many blocks live, how they are
        balanced is the config's) and its target."""
        config = self.quantization_config
        layout = replace(layout, balance=config.balance, live=0)
        whole = layout.pool if config.balance == "row" else layout.blocks
        target = config.overrides.get(first_match(config.overrides, name), {}).get("sparsity", config.sparsity)
        return replace(layout, live=whole), target

    def _tags(self) -> list[str]:
        return ["hf_lowbit", "block-sparse"]

    def _dequantize(self, model, dtype=None):
        dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
        lowbit = any(module.layout.bits is not None for _, module in sparse_modules(model))
        restore_dense_blocks(model.modules(), dtype or (model.dtype if lowbit else None))
        if any(isinstance(module, LowBitModule) for module in model.modules()):
            super()._dequantize(model, dtype)
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
        # a layer that nothing prunes raises in its first training forward; float live blocks train like any weight
        rounded = any(
            layout.form == "blocks" and layout.bits is not None for layout in self.quantization_config.layouts.values()
        )
        rest = self.quantization_config.rest
        return not rounded and (rest is None or rest.training is not None or not rest.is_resolved)


def quantizer_for(quantization_config: LowBitConfig, **kwargs) -> LowBitQuantizer:
    """The quantizer of a config of ours, for transformers and for `hf_lowbit.quantize`."""
    cls = LowBitQuantizer if quantization_config.sparse is None else BlastQuantizer
    return cls(quantization_config, **kwargs)


def prune_once(model: nn.Module) -> None:
    """Keep the best blocks by norm (`one_shot`)."""
    for group in mask_groups(dict(masked_modules(model))):
        layout = group[0].layout
        scores = sum(block_scores(module.oriented(), layout.block) for module in group)
        for module in group:
            module.mask = best_blocks(scores, kept_blocks(module.target, layout.pool), layout.balance)
            clear_module(module)


def prune_further(model: nn.Module, config: BlastConfig) -> None:
    """Let the sparse layers of a model be pruned to the targets of `config`. Raises ValueError for other blocks."""
    targets = {}
    for name, module in sparse_modules(model):
        if isinstance(module, BlockWeight) and module.layout.bits is not None:
            raise ValueError(
                f"`{name}` holds its live blocks in {module.layout.bits} bits: blocks of codes can't be pruned "
                "further. Call `model.dequantize()` first."
            )
        own = config.overrides.get(first_match(config.overrides, name), {})
        block = tuple(own.get("block_size", config.block_size))
        if block != module.layout.block:
            raise ValueError(
                f"`block_size`={block} for `{name}`, which has blocks of {module.layout.block}: call "
                "`model.dequantize()` first, or use its blocks."
            )
        targets[name] = own.get("sparsity", config.sparsity)
    for name, module in list(sparse_modules(model)):
        if isinstance(module, BlockWeight):
            unpack_blocks(module, targets[name], config.balance)
        else:
            module.target = targets[name]
    share_masks(model, config.share_gate_up_mask)
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, BlastQuantizer):
        quantizer.quantization_config = _continued(quantizer.quantization_config, config.sparse)
        quantizer.record(model)
        quantizer.postprocess_config(model)


def _continued(config: BlastConfig, asked: dict) -> BlastConfig:
    """The config of a checkpoint whose layers are pruned further: the new wishes, the stored blocks."""
    continued = BlastConfig(
        asked["sparsity"], tuple(asked["block_size"]), asked["targets"], balance=asked["balance"],
        dense_layers=asked["dense_layers"], overrides=asked["overrides"], bits=asked["bits"], rest=asked["rest"],
        modules_to_not_convert=config.modules_to_not_convert,
        share_gate_up_mask=asked.get("share_gate_up_mask", False),
    )  # fmt: skip
    return continued
