"""Which weights of a model are converted, with which scheme, and why the others are not: decided before any work
starts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..configs.scheme import Scheme
from .block_sparse import BlockModule
from .masked import MaskedModule
from .names import first_match
from .packed import LowBitModule, PackedWeight
from .reads import is_plain_product, only_scales, reads_own_weight
from .rules import between_modules, default_reasons, find_reason, hard_reasons, tied_groups
from .sparse_experts import SparseExperts


class Request(Protocol):
    """The fields of a LowBitConfig that decide."""

    modules: dict[str, Scheme]
    modules_to_not_convert: list[str]
    default_scheme: Scheme
    kinds: tuple[str, ...] | None


@dataclass
class Target:
    """One weight parameter: `name` is the module's name, or the parameter's full name for fused experts.

    `shape` is dense, `transposed` says that the input comes first in it. `packed` says how it is stored once
    converted; None when it stays dense, for `reason`.
    """

    name: str
    module_name: str
    module: nn.Module
    parameter: str
    kind: str
    shape: tuple[int, ...]
    transposed: bool
    packed: PackedWeight | None = None
    reason: str = ""

    @property
    def parameter_name(self) -> str:
        return f"{self.module_name}.{self.parameter}" if self.module_name else self.parameter


def find_targets(model: nn.Module, request: Request) -> list[Target]:
    """`decide` for a model that is going to be converted: ValueError, too, when nothing would be."""
    targets = decide(model, request)
    if not any(target.packed for target in targets):
        raise ValueError(_nothing_message(model, targets))
    return targets


def decide(model: nn.Module, request: Request) -> list[Target]:
    """Decide for every weight a low-bit layer exists for.

    Raises ValueError when a pattern of the config matches nothing, and when a module is asked for that can't be
    converted (all of them named).
    """
    default, hard = default_reasons(model), hard_reasons(model)
    ties = between_modules(model, tied_groups(model))
    used: set[str] = set()
    targets, refused = list(candidates(model)), []
    for target in targets:
        name, module_name, kind = target.name, target.module_name, target.kind
        skip = first_match(request.modules_to_not_convert, name)
        asked = first_match(request.modules, name)
        used |= {pattern for pattern in (skip, asked) if pattern is not None}
        if skip == asked == name:
            raise ValueError(
                f"`modules` and `modules_to_not_convert` both name `{name}`; keep one of the two entries."
            )
        reason = obstacle(target.module, kind, target.parameter) or find_reason(hard, module_name)
        if skip is not None:
            reason = f"`modules_to_not_convert` names it ({skip!r})"
        elif reason is not None:
            # a broad pattern is no demand for one module; an exact name is
            if asked == name:
                refused.append(f"`{name}`: {reason}")
        elif asked is None:
            reason = find_reason(default, module_name) or _tied_reason(target.parameter_name, ties)
            if request.kinds is not None and kind not in request.kinds:
                reason = reason or f"direct training is for linear layers, not for {kind}"
            elif kind == "embedding":
                reason = reason or "embeddings are converted only when `modules` names them"
        target.reason = reason or "converted"
        if reason is None:
            scheme = request.modules[asked] if asked is not None else request.default_scheme
            target.packed = PackedWeight(scheme, target.shape, target.transposed)
    if refused:
        raise ValueError("`modules` names what can't be converted: " + "; ".join(refused) + ". Remove these entries.")
    _share_ties(targets, ties)
    _check_used(model, request, targets, used)
    return targets


def obstacle(module: nn.Module, kind: str, parameter: str) -> str | None:
    """Why a module of a known kind still can't be packed, or None."""
    cls = type(module)
    if isinstance(module, LowBitModule):
        return "already low-bit"
    if isinstance(module, (BlockModule, MaskedModule)):
        return "block-sparse"
    if isinstance(module, SparseExperts):
        return "block-sparse" if parameter in module.stacks else "other weights of its module are block-sparse"
    if parameter not in module._parameters:
        return "its weight is computed by a parametrization"
    if not module._parameters[parameter].is_floating_point():
        return f"its weight is {module._parameters[parameter].dtype}, not a float"
    if module._parameters[parameter].dtype.itemsize == 1:
        return f"its weight is {module._parameters[parameter].dtype}, low-bit already"
    if module._parameters[parameter].numel() == 0:
        return "its weight is empty"
    plain = {"linear": nn.Linear, "conv1d": Conv1D, "embedding": nn.Embedding}.get(kind)
    if (kind == "embedding" and only_scales(cls)) or (kind == "linear" and is_plain_product(cls)):
        plain = None
    if plain is not None and cls is not plain and cls.forward is not plain.forward and reads_own_weight(cls, plain):
        return f"{cls.__name__} has a forward of its own"
    if kind == "embedding" and (module.max_norm is not None or module.sparse):
        return "`max_norm` and `sparse` embeddings change their weight while they are used"
    return None


def candidates(model: nn.Module) -> Iterator[Target]:
    """Every weight of a kind that has a low-bit layer, undecided (`packed` None)."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            shape, kind, transposed = (module.out_features, module.in_features), "linear", False
        elif isinstance(module, Conv1D):
            shape, kind, transposed = (module.nx, module.nf), "conv1d", True
        elif isinstance(module, nn.Embedding):
            shape, kind, transposed = (module.num_embeddings, module.embedding_dim), "embedding", False
        else:
            yield from _expert_candidates(name, module)
            continue
        yield Target(name, name, module, "weight", kind, shape, transposed)


def _expert_candidates(name: str, module: nn.Module) -> Iterator[Target]:
    if "Experts" not in type(module).__name__:
        return
    for parameter, tensor in module.named_parameters(recurse=False):
        if tensor.ndim == 3 and tensor.is_floating_point():
            shape, transposed = tuple(tensor.shape), _experts_transposed(module, parameter)
            yield Target(f"{name}.{parameter}", name, module, parameter, "experts", shape, transposed)


def _experts_transposed(module: nn.Module, parameter: str) -> bool:
    """Is the experts' weight [E, K, N]? Says the class, else the place of the hidden size in the shape."""
    declared = getattr(module, "is_transposed", None)
    if declared is not None:
        return declared
    hidden = getattr(module, "hidden_size", None) or getattr(module, "hidden_dim", None)
    rows, columns = module._parameters[parameter].shape[1:]
    takes_hidden = not parameter.startswith("down")
    return rows != columns and (rows == hidden if takes_hidden else columns == hidden)


def _tied_reason(parameter_name: str, ties: list[set[str]]) -> str | None:
    group = next((group for group in ties if parameter_name in group), None)
    if group is None:
        return None
    others = ", ".join(f"`{name}`" for name in sorted(group - {parameter_name}))
    return f"tied to {others}"


def _share_ties(targets: list[Target], ties: list[set[str]]) -> None:
    """A tied weight that is asked for takes its partners along: one low-bit table, still shared."""
    by_parameter = {target.parameter_name: target for target in targets}
    for group in ties:
        members = [by_parameter[name] for name in sorted(group) if name in by_parameter]
        wanted = [member for member in members if member.packed is not None]
        if not wanted:
            continue
        schemes = {member.packed.scheme for member in wanted}
        kinds = {member.kind for member in members}
        if len(schemes) > 1 or len(members) < len(group) or not kinds <= {"linear", "embedding"}:
            raise ValueError(
                f"`modules` asks to convert {sorted(m.name for m in wanted)}, tied as one tensor with "
                f"{sorted(group)}, but not all of them can share one table (schemes {sorted(map(str, schemes))}). "
                "Name one of them only, or none."
            )
        for member in members:
            if member.packed is None and not member.reason.startswith(("tied", "output", "task", "embeddings")):
                raise ValueError(f"`{wanted[0].name}` is tied to `{member.name}`, which stays dense: {member.reason}.")
            member.packed = PackedWeight(wanted[0].packed.scheme, wanted[0].packed.shape)
            member.reason = "converted"


def _check_used(model: nn.Module, request: Request, targets: list[Target], used: set[str]) -> None:
    names = [name for name, _ in model.named_modules() if name] + [target.name for target in targets]
    owners = tuple({f"{target.module_name}." for target in targets})
    # bare parameters, such as position embeddings, have no module to be named by
    names += [
        name
        for name, _ in model.named_parameters()
        if name.rpartition(".")[2] not in ("weight", "bias") and not name.startswith(owners)
    ]
    for field in ("modules", "modules_to_not_convert"):
        for pattern in getattr(request, field):
            if pattern in used:
                continue
            hit = next((name for name in names if first_match([pattern], name)), None)
            if hit is None:
                raise ValueError(
                    f"`{field}` has {pattern!r}, which matches no module of {type(model).__name__}. Names match whole "
                    'dotted parts ("mlp.gate" is not "mlp.gate_proj") and are those of modules, not of their '
                    "parameters; print(model) lists them."
                )
            if field != "modules":
                below = next((target.name for target in targets if target.name.startswith(f"{hit}.")), None)
                if below is not None:
                    raise ValueError(
                        f"`{field}` has {pattern!r}, which matches `{hit}` but nothing below it, such as `{below}`: "
                        f"it would keep nothing dense. Use {hit!r}, or let the pattern go on."
                    )
                continue
            matched = next((target.name for target in targets if first_match([pattern], target.name)), None)
            if matched is None:
                raise ValueError(
                    f"`modules` has {pattern!r}, which matches `{hit}` but no weight that can be low-bit."
                )
            earlier = first_match(request.modules, matched)
            warnings.warn(
                f"`modules` has {pattern!r}, but entries before it, such as {earlier!r}, already decide for all it "
                "matches; put it first.",
                stacklevel=2,
            )


def _nothing_message(model: nn.Module, targets: list[Target]) -> str:
    if not targets:
        return f"{type(model).__name__} has no linear, Conv1D, embedding or fused experts layer: nothing to convert."
    reasons = "; ".join(f"`{target.name}`: {target.reason}" for target in targets[:8])
    more = f"; and {len(targets) - 8} more" if len(targets) > 8 else ""
    return f"nothing of {type(model).__name__} would be converted. {reasons}{more}."
