"""Low-bit checkpoints of other programs as ours: codes, scales and zero points are moved, nothing is rounded.

    "gptq"                 AutoGPTQ, GPTQModel, AutoRound; v1 and v2 zero points
    "compressed-tensors"   pack-quantized; llm-compressor

A folder becomes a folder. transformers refuses a config of another class for a checkpoint that has one of its own,
so `from_pretrained(path, quantization_config=...)` can't be the way in; and a folder that is converted once loads,
trains, offloads, exports and is pushed like every other low-bit checkpoint. (The folder is `imports`, since `import`
is a word of the language.)
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from ..compression.inspect import meta_model, named_class
from ..configs.lowbit import LowBitConfig
from ..configs.scheme import Scheme
from ..exports.output import check_output, whole_folder
from ..nn.targets import Target, candidates
from ..quantizers.checkpoint import check_stored, recorded_targets
from . import compressed_tensors, gptq
from .checkpoint import INDEX, Checkpoint
from .layer import adopt


FORMATS = {module.METHOD: module for module in (gptq, compressed_tensors)}


@dataclass(frozen=True)
class Import:
    """What was read: the new folder, the format it came from, and the scheme of each low-bit module."""

    folder: Path
    format: str
    modules: dict[str, Scheme]

    def __str__(self) -> str:
        forms = Counter(f"{s.bits} bits, groups of {s.group_size}" if s.block else f"{s.bits} bits, per channel"
                        for s in self.modules.values())  # fmt: skip
        found = ", ".join(f"{count} modules of {form}" for form, count in forms.most_common())
        return f"{self.format} in {self.folder}: {found}; every code, scale and zero point as it was"


def import_checkpoint(checkpoint: str | os.PathLike, output_dir: str | os.PathLike) -> Import:
    """Convert a GPTQ or compressed-tensors checkpoint to a low-bit checkpoint that `from_pretrained` loads.

    Its numbers are those of the source bit for bit: w = s (u - v), formed in float32 and rounded once to the model's
    dtype. Files are converted one at a time, so memory is that of one file.

    Args:
        checkpoint: a folder or Hub id with safetensors files and a `quantization_config`.
        output_dir: a folder that does not exist yet, or is empty. Tokenizer, generation config and card come along.

    Returns:
        An `Import`: where it is, and the scheme of each module.

    Raises:
        ValueError: for another method, for what our layers can't hold (activations in integers, groups in GPTQ's own
            order, fused experts), and for damaged files. FileExistsError: when `output_dir` holds something.
    """
    output, source = check_output(output_dir), Checkpoint(checkpoint)
    config = source.config()
    foreign = config.get("quantization_config") or {}
    method = foreign.get("quant_method") if isinstance(foreign, dict) else None
    if method not in FORMATS:
        raise ValueError(
            f"`quant_method`={method!r} of the checkpoint can't be imported; these can: {list(FORMATS)}."
            + (" It is low-bit already: load it with from_pretrained." if method == "hf_lowbit" else "")
        )
    module = FORMATS[method]
    with whole_folder(output) as temporary:
        _write_config(temporary, config, None)
        dense = AutoConfig.from_pretrained(temporary)
        model = meta_model(named_class(dense), dense)
        targets = {target.name: target for target in candidates(model)}
        modules = _convert(source, module, module.Reader(foreign), targets, temporary)
        written = _saved_config(modules, targets, method)
        _write_config(temporary, config, written.to_dict())
        check_stored(model, recorded_targets(model, written), sorted(map(str, temporary.glob("*.safetensors"))))
        source.copy_rest(temporary)
    return Import(output, method, modules)


def _convert(source: Checkpoint, module, reader, targets: dict[str, Target], folder: Path) -> dict[str, Scheme]:
    """Write every file of weights with its packed layers in our form; the schemes by name."""
    packed = {name.removesuffix("." + module.MAIN) for name in source.names() if name.endswith("." + module.MAIN)}
    if not packed:
        raise ValueError(f"the checkpoint says {module.METHOD!r}, but has no `{module.MAIN}`: nothing is packed.")
    modules: dict[str, Scheme] = {}
    weight_map: dict[str, str] = {}
    for number, file in enumerate(source.files, 1):
        tensors: dict[str, Tensor] = {}
        for name in source.names(file):
            owner, _, leaf = name.rpartition(".")
            if owner in packed and leaf == module.MAIN:
                target = _target(owner, targets)
                layer = reader.read(owner, lambda part, owner=owner: source.tensor(f"{owner}.{part}"), *_sizes(target))
                modules[owner], stored = adopt(layer)
                tensors |= {f"{owner}.weight{suffix}": tensor for suffix, tensor in stored.items()}
            elif owner in packed and leaf == "bias" and _target(owner, targets).module.bias is None:
                _drop_empty_bias(name, source.tensor(name))
            elif owner not in packed or leaf not in module.PARTS:
                tensors[name] = source.tensor(name)
        written = (
            "model.safetensors"
            if len(source.files) == 1
            else f"model-{number:05d}-of-{len(source.files):05d}.safetensors"
        )
        save_file(tensors, folder / written, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, written)
    if len(source.files) > 1:
        size = sum((folder / file).stat().st_size for file in set(weight_map.values()))
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return modules


def _target(name: str, targets: dict[str, Target]) -> Target:
    target = targets.get(name)
    if target is None or len(target.shape) != 2:
        raise ValueError(
            f"`{name}` is packed, but the model has no linear layer of this name: fused experts, and checkpoints "
            "whose names transformers changes while loading, can't be imported."
        )
    return target


def _sizes(target: Target) -> tuple[int, int]:
    """Outputs and inputs."""
    return (target.shape[1], target.shape[0]) if target.transposed else tuple(target.shape)


def _drop_empty_bias(name: str, bias: Tensor) -> None:
    # AutoGPTQ gives each layer a bias of zeros, whether the model has one or not
    if bool(bias.any()):
        raise ValueError(f"`{name}` is not zero, but the model's layer has no bias: they do not belong together.")


def _saved_config(modules: dict[str, Scheme], targets: dict[str, Target], method: str) -> LowBitConfig:
    usual = Counter(modules.values()).most_common(1)[0][0]
    recorded = {name: {**s.to_dict(), "shape": list(targets[name].shape)} for name, s in sorted(modules.items())}
    return LowBitConfig(
        usual.bits, usual.group_size, usual.symmetric, usual.activations, modules=recorded, origin=method
    )


def _write_config(folder: Path, config: dict, quantization: dict | None) -> None:
    fields = {name: value for name, value in config.items() if name != "quantization_config"}
    if quantization is not None:
        fields["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
