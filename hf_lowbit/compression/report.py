"""`report`: what of a model is low-bit, in which scheme, at how many measured bytes, by which kernel, and why the rest
is not.

Every parameter is counted once, so that the shares add up to 100 %.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import nn

from ..configs.scheme import Scheme
from ..functional.block_dispatch import explain_blocks
from ..functional.dispatch import Problem, choose
from ..nn.block_sparse import SUFFIXES, BlockWeight
from ..nn.masked_codes import MaskedCodes
from ..nn.masked_weight import MaskedWeight
from ..nn.names import first_match
from ..nn.packed import LowBitModule, PackedWeight
from ..nn.rules import default_reasons, find_reason, hard_reasons, tied_groups
from ..nn.sharing import explain_sharing
from ..nn.sparse_experts import SparseExperts
from ..nn.sparsify import weights_of
from ..nn.targets import candidates, obstacle
from ..nn.trainable import TrainableModule
from .table import megabytes, render_table


@dataclass
class ModuleReport:
    """One weight. `scheme` is None when it is dense. `bits_per_weight` counts scales and zero points.

    `kernel` is what multiplies one token, `reason` why that one, or why the weight is dense.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    scheme: Scheme | None
    parameters: int
    bytes: int
    bits_per_weight: float
    kernel: str
    reason: str
    # measured share of dead blocks, rows and columns of a block, and bits of the live ones (None: float); None where a
    # weight has no blocks
    sparsity: float | None = None
    block: tuple[int, int] | None = None
    block_bits: str | int | None = None
    # with whom the layer shares the preparation of its input, or why not; None before calls of several rows
    sharing: str | None = None


@dataclass
class Report:
    """What `report` found; `print` shows the table."""

    modules: list[ModuleReport]
    total_parameters: int
    lowbit_parameters: int
    total_bytes: int
    lowbit_bytes: int
    dense_bytes_16bit: int
    bits_per_weight: float

    def to_dict(self) -> dict:
        """Plain JSON."""
        return asdict(self)

    def __str__(self) -> str:
        header = ["weights", "count", "parameters", "share", "MB", "bits/weight", "activations", "kernel", "why"]
        groups: dict[tuple, list[ModuleReport]] = {}
        for m in self.modules:
            why = m.reason if m.sharing is None else f"{m.reason}; {m.sharing}"
            groups.setdefault((m.scheme, m.kernel, why), []).append(m)
        rows = []
        for (scheme, kernel, reason), members in groups.items():
            parameters, size = sum(m.parameters for m in members), sum(m.bytes for m in members)
            rows.append([
                "blocks" if members[0].block else _describe(scheme), str(len(members)), f"{parameters:,}",
                f"{100 * parameters / max(self.total_parameters, 1):.1f} %", megabytes(size),
                f"{8 * size / max(parameters, 1):.2f}", "-" if scheme is None else scheme.activations, kernel, reason,
            ])  # fmt: skip
        share = 100 * self.lowbit_parameters / max(self.total_parameters, 1)
        last = (
            f"{share:.1f} % of {self.total_parameters:,} parameters are low-bit, at {self.bits_per_weight:.2f} bits "
            f"per weight; {megabytes(self.total_bytes)} MB in all, {megabytes(self.dense_bytes_16bit)} MB at 16 bits."
        )
        sparse = [m for m in self.modules if m.sparsity is not None]
        if sparse:
            blocked = sum(m.parameters for m in sparse)
            dead = sum(m.sparsity * m.parameters for m in sparse) / blocked
            last += (
                f"\n{100 * blocked / max(self.total_parameters, 1):.1f} % of them are block-sparse, with {dead:.2%} "
                f"of their blocks dead, in {megabytes(sum(m.bytes for m in sparse))} MB."
            )
        return f"{render_table(header, rows)}\n{last}"


def report(model: nn.Module) -> Report:
    """What is low-bit in `model`, with measured bytes; `print(report(model))` shows it, `.modules` lists every weight.

    Raises TypeError when `model` is not a torch module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch module, got {type(model).__name__}.")
    why_dense, dtype = _reasons(model), compute_dtype(model)
    modules, seen = [], set()
    names = {id(module): name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        lowbit = module.lowbit if isinstance(module, LowBitModule) else {}
        companions = set(module.companions()) if lowbit else set()
        sparse = weights_of(module)
        companions |= {parameter + suffix for parameter in sparse for suffix in SUFFIXES if suffix}
        for parameter, tensor in module.named_parameters(recurse=False):
            if id(tensor) in seen or parameter in companions:
                continue
            seen.add(id(tensor))
            full = f"{name}.{parameter}" if name else parameter
            if parameter in sparse:
                modules.append(_sparse_row(full, module, sparse[parameter], dtype))
            elif parameter in lowbit:
                row = _lowbit_row(full, module, parameter, lowbit[parameter], dtype)
                row.sharing = explain_sharing(module, names)
                modules.append(row)
            else:
                size = tensor.numel() * tensor.element_size()
                reason = why_dense(name, module, parameter)
                kind, bits = type(module).__name__, 8.0 * tensor.element_size()
                modules.append(
                    ModuleReport(full, kind, tuple(tensor.shape), None, tensor.numel(), size, bits, "dense", reason)
                )
    low = [m for m in modules if m.scheme is not None]
    parameters, low_parameters = sum(m.parameters for m in modules), sum(m.parameters for m in low)
    low_bytes = sum(m.bytes for m in low)
    return Report(modules, parameters, low_parameters, sum(m.bytes for m in modules), low_bytes, 2 * parameters,
                  8 * low_bytes / low_parameters if low_parameters else 0.0)  # fmt: skip


def _lowbit_row(
    full: str, module: LowBitModule, parameter: str, packed: PackedWeight, dtype: torch.dtype
) -> ModuleReport:
    tensors = [
        module.stored(parameter),
        *(module._parameters[parameter + suffix] for suffix in packed.tensors() if suffix),
    ]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if hasattr(module, "output_like"):
        kernel, reason = "lookup", "rows are unpacked when they are looked up"
    else:
        used = module.forward_packed() if isinstance(module, TrainableModule) else packed
        choice = choose(problem_for(module, parameter, used, 1, dtype))
        kernel, reason = choice.kernel.name, choice.reason
        if isinstance(module, TrainableModule) and module.weight.requires_grad:
            reason = f"trained directly; evaluated so: {reason}"
    return ModuleReport(full, type(module).__name__, packed.shape, packed.scheme, packed.parameters, size,
                        8 * size / max(packed.parameters, 1), kernel, reason)  # fmt: skip


def _sparse_row(full: str, module: nn.Module, weight: BlockWeight | MaskedWeight, dtype: torch.dtype) -> ModuleReport:
    layout = weight.layout
    parameters, (rows, columns) = layout.parameters, layout.block
    sparsity = weight.measured_sparsity
    reason, bits = f"{sparsity:.1%} of {rows}x{columns} blocks dead", None
    if isinstance(weight, BlockWeight):
        size, (kernel, why), bits = weight.stored_bytes(), explain_blocks(weight.problem(1, dtype))[-1], layout.bits
        if isinstance(module, SparseExperts) and module.first_projection is None:
            kernel, why = "dense", "put back into a dense stack for each forward, which is the module's own"
        reason += f"; {why}"
        if bits is not None:
            reason += f"; the live ones {bits if bits == 'ternary' else f'{bits}-bit'}"
    else:
        size, kernel = weight.stored_bytes(), "dense"
        codes = isinstance(weight, MaskedCodes)
        bits, how = (layout.bits, "trained as dense codes") if codes else (None, "stored dense")
        reason += f", being pruned to {weight.target:.1%}; {how} until `BlastCallback` packs it"
    return ModuleReport(full, type(module).__name__, layout.shape, None, parameters, size,
                        8 * size / max(parameters, 1), kernel, reason, sparsity, layout.block, bits)  # fmt: skip


def problem_for(module: LowBitModule, parameter: str, packed: PackedWeight, rows: int, dtype: torch.dtype) -> Problem:
    """The product a module's packed weight takes part in, for `rows` tokens of `dtype`."""
    scheme = packed.scheme
    return Problem(
        scheme.bits,
        scheme.block or 0,
        scheme.group_size == "tensor",
        not scheme.symmetric,
        scheme.activations == "int8",
        packed.out_features,
        packed.in_features,
        rows,
        dtype,
        module._parameters[parameter].device.type,
    )


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Dtype of the first dense floating parameter, or of what a low-bit table gives: activations have it too."""
    for module in model.modules():
        ours = {*module.lowbit, *module.companions()} if isinstance(module, LowBitModule) else ()
        if hasattr(module, "output_like"):
            return module.output_like.dtype
        for name, parameter in module.named_parameters(recurse=False):
            if name not in ours and parameter.is_floating_point():
                return parameter.dtype
    return torch.get_default_dtype()


def _reasons(model: nn.Module):
    default, hard, ties = default_reasons(model), hard_reasons(model), tied_groups(model)
    forms = {target.parameter_name: target for target in candidates(model)}
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    named = getattr(config, "modules_to_not_convert", None) or []

    def why(name: str, module: nn.Module, parameter: str) -> str:
        target = forms.get(f"{name}.{parameter}" if name else parameter)
        if target is None:
            vector = parameter != "weight" and module._parameters[parameter].ndim < 2
            if vector or parameter.endswith("bias"):
                return "bias or other vector"
            return f"no low-bit form of {type(module).__name__}"
        skip = first_match(named, target.name)
        if skip is not None:
            return f"`modules_to_not_convert` names it ({skip!r})"
        reason = find_reason(hard, name) or find_reason(default, name)
        if reason is None and any(target.parameter_name in group for group in ties):
            reason = "tied weight"
        if reason is None and target.kind == "embedding":
            reason = "embeddings are converted only when `modules` names them"
        return reason or obstacle(module, target.kind, parameter) or "not converted"

    return why


def _describe(scheme: Scheme | None) -> str:
    if scheme is None:
        return "dense"
    bits = scheme.bits if isinstance(scheme.bits, str) else f"{scheme.bits} bits"
    scope = {None: "per channel", "tensor": "per tensor"}.get(scheme.group_size, f"groups of {scheme.group_size}")
    return f"{bits}, {scope}" + ("" if scheme.symmetric else ", zero points")
