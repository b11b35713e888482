"""What stays dense by default, and the reason, module by module.

transformers' own helper looks at the last parameter only, so a head with a bias is quantized. Ours asks of every
module: is it an output layer, tied to another weight, a task head, a router, kept in float32 by the model, read
directly by other code, or of a class whose forward is not a plain product? Each answer is a sentence that `report` and
`inspect` print.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from .names import matches
from .reads import directly_read


# children of a model without a base-model attribute that are task heads by their name
HEAD_NAMES = {"classifier", "classification_head", "score", "scorer", "lm_head", "qa_outputs", "cls", "head", "heads",
              "proj_out", "embed_out", "output_projection",
              "class_predictor", "bbox_predictor", "logits_proj"}  # fmt: skip
ROUTER_NAMES = {"gate", "router", "shared_expert_gate", "routing_gate", "expert_gate"}
# no mixture of experts has more; wider layers of that name are ordinary projections
MOST_EXPERTS = 1024


def default_reasons(model: nn.Module) -> dict[str, str]:
    """{module name: why it stays dense unless it is asked for}. A name stands for everything below it too."""
    reasons: dict[str, str] = {}
    for prefix, part in model.named_modules():
        if isinstance(part, PreTrainedModel):
            for name, reason in _model_reasons(part):
                reasons.setdefault(".".join(p for p in (prefix, name) if p), reason)
    for name, module in model.named_modules():
        # the layer itself, or the one inside a router module (`router.classifier`, `router.layer`, `gate.wg`)
        if isinstance(module, nn.Linear) and ROUTER_NAMES.intersection(name.split(".")[-2:]):
            if module.out_features <= MOST_EXPERTS:
                reasons.setdefault(name, "router")
    return reasons


def hard_reasons(model: nn.Module) -> dict[str, str]:
    """{module name: why it can't be converted at all}."""
    reasons = {name: f"its weight is read directly by {reader}" for name, reader in directly_read(model).items()}
    for prefix, part in model.named_modules():
        if not isinstance(part, PreTrainedModel):
            continue
        kept = list(getattr(part, "_keep_in_fp32_modules", None) or [])
        kept += list(getattr(part, "_keep_in_fp32_modules_strict", None) or [])
        for name, _ in part.named_modules():
            if name and any(matches(pattern, name) for pattern in kept):
                reasons.setdefault(".".join(p for p in (prefix, name) if p), "the model keeps it in float32")
    return reasons


def tied_groups(model: nn.Module) -> list[set[str]]:
    """Sets of parameter names that are, or will be, one tensor."""
    groups: list[set[str]] = []
    by_tensor: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), set()).add(name)
    pairs = [group for group in by_tensor.values() if len(group) > 1]
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    pairs += [{target, source} for target, source in tied.items()]
    for pair in pairs:
        touching = [group for group in groups if group & pair]
        merged = set(pair).union(*touching)
        groups = [group for group in groups if not group & pair] + [merged]
    return groups


def between_modules(model: nn.Module, groups: list[set[str]]) -> list[set[str]]:
    """The tied groups without second names: a module that is registered twice is one, and not tied to another."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(m), name) for name, m in model.named_modules(remove_duplicate=False)}

    def canonical(parameter: str) -> str:
        owner, dot, leaf = parameter.rpartition(".")
        return f"{names.get(owner, owner)}{dot}{leaf}"

    return [group for group in ({canonical(name) for name in group} for group in groups) if len(group) > 1]


def find_reason(reasons: dict[str, str], name: str) -> str | None:
    """The reason recorded for `name` or the nearest of its parents."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        reason = reasons.get(".".join(parts[:end]))
        if reason is not None:
            return reason
    return None


def _model_reasons(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """(name inside `model`, reason) for output layers and task heads of one pretrained model."""
    names = {id(module): name for name, module in model.named_modules()}
    output = _output_embeddings(model)
    if output is not None and id(output) in names:
        yield names[id(output)], "output embeddings"
    base = getattr(model, model.base_model_prefix, None) if model.base_model_prefix else None
    has_base = isinstance(base, nn.Module) and base is not model
    for name, child in model.named_children():
        if has_base:
            # a second pretrained model beside the base one is a tower, not a head
            if child is not base and not any(isinstance(m, PreTrainedModel) for m in child.modules()):
                yield name, "task head"
        elif name in HEAD_NAMES and "For" in type(model).__name__:
            # only models for a task have one: the `head` of a plain vision tower pools its tokens
            yield name, "task head"


def _output_embeddings(model: PreTrainedModel) -> nn.Module | None:
    try:
        output = model.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        # encoders and composite models have none
        return None
    return output if isinstance(output, nn.Module) else None
