"""Where PEFT meets low-bit layers. Installed once, right after `peft` has been imported, before or after us.

PEFT has no registry of layers that also holds when an adapter is loaded, so its entry points are wrapped. For models
without low-bit layers every wrapper only passes the call on.

1. `_create_and_replace` of each tuner, which builds the adapter layer over one module. Over a low-bit one it runs on
   the layer's dense form, so that shapes, dtypes and whatever an initialization reads are those of the real weight;
   the adapter layer then gets our `merge` (`adapter.LowBitAdapter`). What would be wrong is refused here, before
   anything is trained.
2. `dequantize_module_weight`, with which DoRA reads the weight in its forward.
3. `_unload_and_optionally_merge`, after which the model's quantization config says what is low-bit now.
4. `ModulesToSaveWrapper.update`, which makes a module trainable as a whole: codes can't be.

Importing this module costs nothing: the rest is imported when the first adapter meets a low-bit layer.
"""

from __future__ import annotations

import functools
import sys


# methods whose forward uses the base layer's output alone, or reads its weight with `dequantize_module_weight`;
# each is compared with the dequantized model by the tests
SUPPORTED = ("LORA", "ADALORA", "IA3", "OFT", "VERA")
# initializations of LoRA that leave the base weight as it is
INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal", "mica")
PACKED = "hf_lowbit.nn.packed"


def install() -> None:
    """Wrap PEFT's entry points, once. `peft` must have been imported."""
    from peft.tuners import tuners_utils

    if hasattr(tuners_utils.BaseTuner, "_hf_lowbit"):
        return
    tuners_utils.BaseTuner._hf_lowbit = True
    for tuner in _subclasses(tuners_utils.BaseTuner):
        if "_create_and_replace" in vars(tuner):
            tuner._create_and_replace = _wrap_create(tuner._create_and_replace)
    for tuner in (tuners_utils.BaseTuner, *_subclasses(tuners_utils.BaseTuner)):
        if "_unload_and_optionally_merge" in vars(tuner):
            tuner._unload_and_optionally_merge = _wrap_unload(tuner._unload_and_optionally_merge)
    _wrap_dequantize()
    _wrap_modules_to_save()


def _subclasses(cls: type) -> list[type]:
    found = []
    for child in cls.__subclasses__():
        found += [child, *_subclasses(child)]
    return list(dict.fromkeys(found))


def is_lowbit(module) -> bool:
    """Whether `module` is a low-bit layer; False, at no cost, in a process that has none.

    Trainable ones (with a `training_form`) look like float layers to PEFT, and refuse to be merged into by themselves.
    """
    packed = sys.modules.get(PACKED)
    if packed is None or not isinstance(module, packed.LowBitModule) or "training_form" in module.__dict__:
        return False
    return bool(module.__dict__.get("lowbit"))


def _wrap_create(create):
    @functools.wraps(create)
    def create_and_replace(self, config, adapter_name, target, target_name, parent, *args, **kwargs):
        base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        if is_sparse(base):
            return _create_over_blocks(create, self, config, adapter_name, target, target_name, parent, args, kwargs)
        if not is_lowbit(base):
            return create(self, config, adapter_name, target, target_name, parent, *args, **kwargs)
        from ..nn.original import dense_form
        from .adapter import adapt

        name = kwargs.get("current_key") or (args[0] if args else target_name)
        refuse(config, base, name, kwargs.get("parameter_name"))
        dtype = _dtype(self, base)
        with dense_form(base, dtype):
            made = create(self, config, adapter_name, target, target_name, parent, *args, **kwargs)
        layer = getattr(parent, target_name)
        if hasattr(layer, "get_base_layer"):
            adapt(layer, name, _is_tied(self.model, base), dtype)
        return made

    return create_and_replace


def is_sparse(module) -> bool:
    """Whether `module` is a block-sparse layer, or one that is being pruned; False, at no cost, without any."""
    sparsify = sys.modules.get("hf_lowbit.nn.sparsify")
    return sparsify is not None and isinstance(module, sparsify.SparseModule)


def _create_over_blocks(create, self, config, adapter_name, target, target_name, parent, args, kwargs):
    """Build a LoRA layer over a block-sparse one; its merge is refused (`sparse_adapter`)."""
    from .sparse_adapter import adapt, refuse_over_blocks

    base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
    name = kwargs.get("current_key") or (args[0] if args else target_name)
    refuse_over_blocks(config, base, name, kwargs.get("parameter_name"))
    made = create(self, config, adapter_name, target, target_name, parent, *args, **kwargs)
    adapt(getattr(parent, target_name), name)
    return made


def refuse(config, base, name: str, parameter_name: str | None = None) -> None:
    """Raise ValueError for an adapter that can't be right on the low-bit layer `base`, called `name`."""
    method = str(getattr(config.peft_type, "value", config.peft_type))
    what = f"`{name}` ({type(base).__name__}) is low-bit"
    instead = "call `model.dequantize()` before `get_peft_model`"
    if parameter_name is not None:
        raise ValueError(
            f"`target_parameters`: {what}, and `{parameter_name}` holds packed codes, to which PEFT can't add. (For "
            'mixtures PEFT\'s "all-linear" and defaults include the fused experts.) Name the '
            f"linear layers in `target_modules`, leave the module dense with `modules_to_not_convert`, or {instead}."
        )
    if method not in SUPPORTED:
        raise ValueError(
            f"`peft_type`={method}: {what}, and these adapters have not been shown to be right there: many read the "
            f"weight itself. Use one of {', '.join(SUPPORTED)}, or {instead}."
        )
    initialization = getattr(config, "init_lora_weights", True)
    initialization = initialization.lower() if isinstance(initialization, str) else initialization
    if initialization not in INITIALIZATIONS:
        raise ValueError(
            f"`init_lora_weights`={initialization!r}: {what}, and this initialization changes the base weight, which "
            f'stays on its grid. Use True, "gaussian", "eva", "orthogonal" or "mica", or {instead}.'
        )
    for field in ("kasa_config", "megatron_config"):
        if getattr(config, field, None) is not None:
            raise ValueError(f"`{field}`: {what}, and this changes the base weight. Leave it out, or {instead}.")


def _dtype(tuner, base):
    """What the layer computes in: its bias's dtype, else the model's as it was before the first adapter."""
    import torch

    from .accounting import _dtype as model_dtype

    bias = base._parameters.get("bias")
    if bias is not None and bias.is_floating_point():
        return bias.dtype
    if tuner.__dict__.get("_hf_lowbit_dtype") is None:
        tuner.__dict__["_hf_lowbit_dtype"] = model_dtype(tuner.model) or torch.float32
    return tuner.__dict__["_hf_lowbit_dtype"]


def _is_tied(model, base) -> bool:
    """Whether another module holds the same packed tensor."""
    codes = base._parameters["weight"]
    holders = {id(m) for m in model.modules() if any(p is codes for p in m._parameters.values())}
    return len(holders | {id(base)}) > 1


def _wrap_unload(unload):
    @functools.wraps(unload)
    def unload_and_optionally_merge(self, *args, **kwargs):
        model = unload(self, *args, **kwargs)
        quantizer = getattr(self.model, "hf_quantizer", None)
        if PACKED in sys.modules and type(quantizer).__name__ == "LowBitQuantizer":
            if any(is_lowbit(module) for module in self.model.modules()):
                quantizer.record(self.model)
            else:
                # all of it was merged into: the model is an ordinary dense one
                quantizer.remove_quantization_config(self.model)
        return model

    return unload_and_optionally_merge


def _wrap_dequantize() -> None:
    """PEFT's modules import the function by name: it is replaced in each of them."""
    from peft.utils import integrations

    read = integrations.dequantize_module_weight

    @functools.wraps(read)
    def dequantize_module_weight(module):
        return module.dense_weight() if is_lowbit(module) else read(module)

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "peft" and vars(module).get("dequantize_module_weight") is read:
            module.dequantize_module_weight = dequantize_module_weight


def _wrap_modules_to_save() -> None:
    from peft.utils.other import ModulesToSaveWrapper

    update = ModulesToSaveWrapper.update

    @functools.wraps(update)
    def refuse_codes(self, *args, **kwargs):
        found = next((module for module in self.original_module.modules() if is_lowbit(module)), None)
        if found is not None:
            raise ValueError(
                f"`modules_to_save` asks for the whole of a {type(self.original_module).__name__}, whose weights are "
                f"low-bit: {found}. Packed codes take no gradients. Quantize with the module in "
                "`modules_to_not_convert`, or name it in `target_modules`."
            )
        return update(self, *args, **kwargs)

    ModulesToSaveWrapper.update = refuse_codes
