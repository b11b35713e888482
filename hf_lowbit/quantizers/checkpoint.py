"""Checking a low-bit checkpoint: against its config and the model before anything is allocated, and its numbers after.

A file that is truncated, tampered with or from another model must stop with a sentence, never load as garbage.
"""

from __future__ import annotations

from collections.abc import Iterable
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..configs.lowbit import LowBitConfig
from ..functional.grid import TERNARY, grid_of
from ..nn.names import matches
from ..nn.packed import PackedWeight
from ..nn.rules import tied_groups
from ..nn.targets import Target, candidates, obstacle


# safetensors' names of the dtypes of stored tensors
DTYPE_NAMES = {torch.int8: "I8", torch.float32: "F32", torch.bfloat16: "BF16"}
# problems listed in one message
SHOWN = 6
# share of a model's parameters that a checkpoint may leave to be drawn
MOST_LACKING = 0.5


def check_resolved(config: LowBitConfig) -> None:
    """Raise ValueError when a checkpoint's config does not list what is low-bit."""
    if not config.is_resolved:
        raise ValueError(
            "`quantization_config` of the checkpoint has no `modules` with shapes: it does not say what is "
            "low-bit. The checkpoint is damaged or was not written by hf_lowbit."
        )


def recorded_targets(model: nn.Module, config: LowBitConfig) -> list[Target]:
    """The targets that a checkpoint's config lists, found in the model.

    Names may differ by the base model's prefix (a causal LM's checkpoint loaded as its base model). Raises ValueError
    when a listed module does not exist, cannot be low-bit or has another shape.
    """
    by_name = {candidate.name: candidate for candidate in candidates(model)}
    saved_as = getattr(model.config, "architectures", None) or []
    same_class = type(model).__name__ in saved_as
    targets, problems = [], []
    for name, scheme in config.modules.items():
        shape = config.shapes.get(name)
        target = next((by_name[n] for n in _spellings(name, model) if n in by_name), None)
        if target is None:
            if same_class:
                problems.append(f"`{name}` is listed as low-bit, but {type(model).__name__} has no such weight")
            continue
        if shape != target.shape:
            problems.append(f"`{name}` is listed with shape {shape}, but the model's is {tuple(target.shape)}")
            continue
        reason = obstacle(target.module, target.kind, target.parameter)
        if reason is not None:
            problems.append(f"`{name}` is listed as low-bit, but can't be: {reason}")
            continue
        target.packed = PackedWeight(scheme, shape, target.transposed)
        target.reason = "converted"
        targets.append(target)
    if not problems and not targets:
        problems = [f"none of the {len(config.modules)} modules it lists exists in {type(model).__name__}"]
    _raise("the checkpoint's `quantization_config` does not fit the model", problems)
    return targets


def check_stored(
    model: nn.Module, targets: list[Target], files: list[str] | None, checked: Iterable[str] = ()
) -> None:
    """Compare the checkpoint's files with what the targets need; parameters in `checked` are others' to compare.

    Raises ValueError with every difference.
    """
    stored: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in files or []:
        try:
            stored |= _headers(str(file))
        except FileNotFoundError:
            raise ValueError(f"`{file}` is missing, though the checkpoint's index names it; fetch it again.") from None
        except (SafetensorError, OSError, EOFError, RuntimeError, UnpicklingError) as error:
            raise ValueError(
                f"`{file}` can't be read: {error}. The file is truncated or damaged; fetch it again."
            ) from None
    if not stored:
        return
    tied = {name: group for group in tied_groups(model) for name in group}

    def find(name: str, suffix: str = "") -> tuple[tuple[int, ...], str] | None:
        # a tied tensor is stored once, under any of its names
        names = [name, *sorted(tied.get(name, set()) - {name})]
        spellings = (spelling for n in names for spelling in _spellings(n + suffix, model))
        return next((stored[n] for n in spellings if n in stored), None)

    problems = []
    for target in targets:
        if target.packed.scheme.symmetric and find(target.parameter_name, "_zero_point") is not None:
            problems.append(f"`{target.parameter_name}_zero_point` is there, but the config says `symmetric`")
        for suffix, (shape, dtype) in target.packed.tensors().items():
            name, found = target.parameter_name + suffix, find(target.parameter_name, suffix)
            if found is None:
                problems.append(f"`{name}` is missing")
            elif found != (shape, DTYPE_NAMES[dtype]):
                problems.append(f"`{name}` is {found[1]} {found[0]}, expected {DTYPE_NAMES[dtype]} {shape}")
    lowbit = {target.parameter_name for target in targets} | set(checked)
    dense = {name: parameter for name, parameter in model.named_parameters() if name not in lowbit}
    unlisted = [name for name in dense if (find(name) or ((), ""))[1] == DTYPE_NAMES[torch.int8]]
    problems += [f"`{name}` holds codes, but `modules` does not list it" for name in unlisted]
    _raise("the checkpoint's tensors do not fit its config", problems)
    lacking = [n for n, p in dense.items() if (find(n) or (None,))[0] != tuple(p.shape)]
    lacks = sum(dense[name].numel() for name in lacking)
    total = sum(parameter.numel() for parameter in model.parameters())
    # a new head or pooler is drawn anew, as transformers does for dense models; that is not what this is
    if lacks > MOST_LACKING * total:
        raise ValueError(
            f"the checkpoint's config describes a model of {total:,} parameters, of which the checkpoint lacks "
            f"{lacks:,} (`{lacking[0]}` and others). Config and weights belong to different models."
        )


def check_shapes(model: nn.Module, expected: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError when a dense tensor came in another shape than the model gave it.

    transformers 5.16 puts such tensors in place as they are, once a quantizer is present.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if name in expected}
    wrong = [name for name, shape in shapes.items() if shape != expected[name]]
    problems = [f"`{name}` is {shapes[name]}, the model's is {expected[name]}" for name in wrong]
    _raise("the checkpoint's tensors do not fit the model", problems)


def check_loaded(targets: Iterable[Target]) -> None:
    """Raise ValueError when scales or codes hold what no quantizer writes. Offloaded (meta) tensors are left alone."""
    problems = []
    for target in targets:
        parameters, name = target.module._parameters, target.parameter
        stored, scale, zero_point = (parameters[name + s] for s in ("", "_scale", "_zero_point"))
        if stored.device.type == "meta" or scale.device.type == "meta":
            continue
        grid = grid_of(target.packed.scheme.bits)
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            problems.append(f"`{target.name}` has a scale that is not a positive number")
        # the fourth value of a two-bit field is no ternary code
        if grid.bits == TERNARY and bool((stored & (stored >> 1) & 0x55).any()):
            problems.append(f"`{target.name}` has codes outside {{-1, 0, 1}}")
        if zero_point is not None and bool(((zero_point < grid.qmin) | (zero_point > grid.qmax)).any()):
            problems.append(f"`{target.name}` has zero points outside [{grid.qmin}, {grid.qmax}]")
    _raise("the checkpoint holds damaged numbers", problems)


def naming_conflict(config: LowBitConfig) -> str | None:
    """Why names in the config passed at load disagree with what the checkpoint's own config records, or None."""
    requested = getattr(config, "requested", None)
    if requested is None or config.dequantize:
        return None
    for pattern, scheme in requested["modules"].items():
        stored = {name: config.modules[name] for name in config.modules if matches(pattern, name)}
        wrong = next((name for name, own in stored.items() if own != scheme), None)
        if wrong is not None:
            return f"`modules[{pattern!r}]` asks for {scheme}, but the checkpoint holds `{wrong}` as {stored[wrong]}."
        if not stored:
            return f"`modules` names {pattern!r}, which matches nothing that is low-bit in the checkpoint."
    for pattern in requested["modules_to_not_convert"]:
        name = next((name for name in config.modules if matches(pattern, name)), None)
        if name is not None:
            return f"`modules_to_not_convert` names {pattern!r}, but the checkpoint holds `{name}` low-bit."
    return None


def _headers(file: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor in a file, without reading their numbers."""
    if not file.endswith(".safetensors"):
        tensors = torch.load(file, map_location="meta", weights_only=True)
        return {key: (tuple(t.shape), DTYPE_NAMES.get(t.dtype, str(t.dtype))) for key, t in tensors.items()}
    with safe_open(file, framework="pt") as handle:
        slices = {key: handle.get_slice(key) for key in handle.keys()}
        return {key: (tuple(part.get_shape()), str(part.get_dtype())) for key, part in slices.items()}


def _spellings(name: str, model: nn.Module) -> list[str]:
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix:
        return [name]
    return [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]


def _raise(what: str, problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(f"{what}: {'; '.join(problems[:SHOWN])}{more}.")
