"""`LowBitQuantizer`: what transformers calls while it loads and saves a low-bit model.

On the fly, modules become low-bit on the meta device, and each dense tensor is rounded and packed the moment it is
read: peak memory is the low-bit model and one tensor. A pre-quantized checkpoint is checked against its own config and
the model before anything is allocated, then loaded into place. Works with transformers 5.16 to 5.24, whose quantizer
base class differs.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.base import HfQuantizer

from ..configs.lowbit import FORMAT_VERSION, LowBitConfig
from ..nn.arming import disarm
from ..nn.packed import LowBitModule
from ..nn.swap import flatten_head, prepare, quantize, restore_dense
from ..nn.targets import Target, find_targets
from .armed import arm_codes
from .calibrated import calibration_batches, check_plan, convert_dense, needs_dense
from .checkpoint import check_loaded, check_resolved, check_shapes, check_stored, naming_conflict, recorded_targets
from .installing import install
from .on_the_fly import QuantizeOp
from .outside import check_inside
from .ownership import own_config
from .parts import mark_parts
from .record import record_modules
from .spool import SpoolOp
from .transitions import settle


def refuse_parallel(distributed) -> None:
    """Raise ValueError when `from_pretrained` was asked to shard the model over processes."""
    for field in ("tp_size", "ep_size", "fsdp_size"):
        size = getattr(distributed, field, None) or 1
        if size > 1:
            raise ValueError(
                f"`{field}`={size}: low-bit weights can't be sharded over processes while loading. Load without "
                "`tp_plan` or `distributed_config`; `device_map` spreads whole layers over devices."
            )


class LowBitQuantizer(HfQuantizer):
    """See the module. Raises ValueError for conflicting configs and for what can't be loaded right."""

    requires_calibration = False
    quantization_config: LowBitConfig

    def __init__(self, quantization_config: LowBitConfig, **kwargs):
        # the user's object stays theirs: what was converted is recorded in a copy
        super().__init__(copy.deepcopy(quantization_config), **kwargs)
        install()
        self._targets: dict[str, Target] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        # layers whose weights can't be rounded, and why; transformers would hide an exception raised while loading
        self._failures: dict[str, str] = {}
        self._freeze = False
        # of what needs the dense model: whether it is converted once it is there, and the data
        self._late = False
        self._batches: list[dict] | None = None
        # dtypes of the dense weights that wait on disk until then
        self._spooled: dict[str, torch.dtype] = {}
        if self.pre_quantized:
            self.quantization_config, self._freeze = settle(self.quantization_config)
            conflict = None if self._freeze else naming_conflict(self.quantization_config)
            if conflict is not None:
                raise ValueError(f"`quantization_config`: {conflict}")
            check_resolved(self.quantization_config)
        if not self.pre_quantized and self.quantization_config.dequantize:
            raise ValueError("`dequantize`=True needs a low-bit checkpoint; this one is dense already.")

    def validate_environment(self, *args, device_map=None, **kwargs):
        places = device_map.values() if isinstance(device_map, dict) else [device_map]
        if not self.pre_quantized and "disk" in places:
            raise ValueError(
                "`device_map` sends weights to disk while they are quantized on the fly: the offloaded file would "
                "keep the dense numbers. Quantize and save once with memory for the low-bit model, then load that "
                "checkpoint with disk offload."
            )

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        return not self.pre_quantized and (param_name in self._targets or param_name in self._spooled)

    def param_element_size(self, model, param_name: str, param) -> float:
        target = self._targets.get(param_name)
        if target is not None and target.packed.parameters and not self.pre_quantized:
            return target.packed.bytes() / target.packed.parameters
        return param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        if self._spooled:
            return SpoolOp(self.quantization_config.spool, self._spooled)
        return QuantizeOp(self._targets, self._failures)

    def update_weight_conversions(self, weight_conversions, *args, **kwargs):
        # our checkpoints hold the module's own tensors: what splits, merges or permutes dense ones must not touch them
        if self.pre_quantized:
            return [entry for entry in weight_conversions if not isinstance(entry, WeightConverter)]
        return list(weight_conversions)

    def update_parallel_plan(self, model, plan):
        return None

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        refuse_parallel(getattr(model.config, "distributed_config", None))
        check_inside(model, checkpoint_files)
        if self.pre_quantized:
            targets = recorded_targets(model, self.quantization_config)
            check_stored(model, targets, checkpoint_files)
        else:
            targets = [target for target in find_targets(model, self.quantization_config) if target.packed is not None]
            check_plan(model, self.quantization_config)
            self._late = needs_dense(self.quantization_config)
            self._batches = calibration_batches(model, self.quantization_config)
        if self._late:
            # statistics and plans need the dense model: it is loaded as it is, and converted afterwards
            if self.quantization_config.spool is not None:
                self._spooled = {n: p.dtype for n, p in model.named_parameters() if p.ndim > 1}
            self._shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
            return model
        self._targets = {target.parameter_name: target for target in targets}
        prepare(targets, load_packed=self.pre_quantized, device="meta")
        self._tie_companions(model, self._targets)
        self._shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if n not in self._targets}
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self._failures:
            raise ValueError(" ".join(self._failures.values()))
        check_shapes(model, self._shapes)
        for target in self._targets.values():
            self._finish(target)
        check_loaded(self._targets.values())
        if self._late:
            self._convert_late(model)
        self._targets, self._shapes = {}, {}
        self.make_trainable(model)
        self.record(model)
        # saved under the module's own names, so that Trainer's resume finds every tensor again
        model._weight_conversions = []
        flatten_head(model)
        if self.quantization_config.dequantize:
            self._dequantize(model, model.dtype)
            self.remove_quantization_config(model)
        else:
            self.tag(model)
        return model

    def _convert_late(self, model) -> None:
        config, targets = convert_dense(model, self.quantization_config, self._batches)
        self.quantization_config, self._batches, self._late, self._spooled = config, None, False, {}
        self.postprocess_config(model)
        self._tie_companions(model, {target.parameter_name: target for target in targets})

    def _finish(self, target: Target) -> None:
        """A weight that the checkpoint did not have was initialized dense by transformers: round it like the
        others."""
        module, name = target.module, target.parameter
        weight = module._parameters[name]
        if weight.is_floating_point() and weight.device.type != "meta":
            for suffix, tensor in quantize(target, weight).items():
                module._parameters[name + suffix] = nn.Parameter(tensor, requires_grad=False)
        for suffix in target.packed.tensors():
            module._parameters[name + suffix].requires_grad_(False)
        module._is_hf_initialized = True

    def make_trainable(self, model) -> None:
        """Put the low-bit linear weights behind parameters that take gradients, where the config says so."""
        config = self.quantization_config
        if config.training is None:
            return
        armed = arm_codes(model, config)
        if not armed:
            raise ValueError(
                f"no low-bit weight of {type(model).__name__} can be trained directly: they are embeddings, fused "
                "experts or shared. Load it without `DQTConfig` and train adapters."
            )
        if self._freeze:
            disarm(model)
            self.quantization_config = config.frozen()
            self.postprocess_config(model)

    def record(self, model) -> None:
        """Write what is low-bit, with schemes and shapes, into the config: this is what gets saved."""
        record_modules(model, self.quantization_config)
        mark_parts(model, self.quantization_config)

    def attach(self, model, targets: list[Target]) -> None:
        """Give a model that was converted in memory what `from_pretrained` leaves on one: config, quantizer, names."""
        self.record(model)
        if not isinstance(model, PreTrainedModel):
            # a plain torch module, or a layer of a model: nothing of transformers to tell
            return
        self._tie_companions(model, {target.parameter_name: target for target in targets})
        own_config(model)
        model.hf_quantizer = self
        model.is_quantized = True
        model.quantization_method = self.quantization_config.quant_method
        model._weight_conversions = []
        self.postprocess_config(model)
        self.tag(model)

    def postprocess_config(self, model) -> None:
        """Record the config on the model and mark its parts as quantized, as transformers does after loading."""
        model.config.quantization_config = self.quantization_config
        for module in model.modules():
            if hasattr(module, "config") and hasattr(module.config, "to_diff_dict"):
                module.config._is_quantized = True

    def tag(self, model) -> None:
        """Hub tags that every card of this model carries."""
        model.add_model_tags(self._tags())

    def _tags(self) -> list[str]:
        bits = sorted({str(scheme.bits) for scheme in self.quantization_config.modules.values()})
        return ["hf_lowbit", "low-bit", *(b if b == "ternary" else f"{b}-bit" for b in bits)]

    def _tie_companions(self, model, targets: dict[str, Target]) -> None:
        """Scales and zero points of a shared table are tied as its codes are."""
        tied = getattr(model, "all_tied_weights_keys", None)
        for target_name, source in list((tied or {}).items()):
            # a module that is registered twice is a target under one of its names only
            target = targets.get(target_name, targets.get(source))
            if target is not None:
                for suffix in target.packed.tensors():
                    tied[target_name + suffix] = source + suffix

    def dequantize(self, model, dtype=None):
        """Turn `model` into a dense one, all of it in `dtype`; None: the dtype it computes in now.

        Parameters that are kept in another dtype than the model's (float32 in a half-precision one) stay in it.
        """
        own = model.dtype
        dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype or own
        self._dequantize(model, dtype)
        if dtype != own:
            # layers that were dense before would refuse the others' numbers
            for tensor in model.state_dict(keep_vars=True).values():
                if tensor.dtype == own:
                    tensor.data = tensor.data.to(dtype)
        self.remove_quantization_config(model)
        return model

    def _dequantize(self, model, dtype=None):
        offloaded = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
        if offloaded:
            raise ValueError(
                f"`{offloaded[0]}` is offloaded: its dense form has no place to go. Load the checkpoint without "
                "offload, on a device that holds the dense model, and dequantize that."
            )
        # saving leaves the config's dtype as a string
        dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
        restore_dense(model.modules(), dtype or model.dtype)
        tied = getattr(model, "all_tied_weights_keys", None)
        for name in [n for n in (tied or {}) if n.endswith(("weight_scale", "weight_zero_point"))]:
            del tied[name]
        return model

    def remove_quantization_config(self, model):
        super().remove_quantization_config(model)
        if getattr(model, "model_tags", None):
            model.model_tags = [tag for tag in model.model_tags if tag not in self._tags()]
        # transformers before 5.21 leaves it behind; saving a dense model must use the original names again
        model.__dict__.pop("_weight_conversions", None)

    def get_state_dict_and_metadata(self, model, *args, **kwargs):
        # modules may have been resized or replaced since they were loaded; transformers writes the config after this
        self.record(model)
        lowbit = [packed for m in model.modules() if isinstance(m, LowBitModule) for packed in m.lowbit.values()]
        bits = 8 * sum(packed.bytes() for packed in lowbit) / max(sum(packed.parameters for packed in lowbit), 1)
        metadata = {
            "hf_lowbit_format_version": str(FORMAT_VERSION),
            "total_parameters": str(model.num_parameters()),
            "low_bit_bits_per_weight": f"{bits:.4f}",
        }
        return None, metadata

    def is_serializable(self, *args, **kwargs) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        # adapters on top always train
        return True

    @property
    def is_qat_trainable(self) -> bool:
        # the packed weights themselves train only where the config says so; then an optimizer that is not ours raises
        # at its first step
        return self.quantization_config.training is not None

    @property
    def is_compileable(self) -> bool:
        return True
