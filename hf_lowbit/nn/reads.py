"""Weights that model code reads directly, as in `F.linear(x, self.dt_proj.weight)`, found in the code itself.

A packed weight is only right inside its own layer's forward. Reading `.weight` elsewhere would take codes for numbers,
and reading `.weight.dtype` would cast activations to the codes' dtype; both silently. So the source of every class in
the model is searched for `self.<path>.weight`, and what it names stays dense. A read is harmless when it asks for the
device only, stands in a method that compares the dtype with `torch.int8` (T5), or under `if self.training` (packed
weights don't train).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache

from torch import nn


# methods that treat weights as parameters and not as numbers; initializers run before packing
NOT_FORWARD = ("post_init", "tie_weights", "_tie_weights", "load_hook", "_load_from_state_dict", "extra_repr")
INITIALIZERS = ("init", "reset")
# classes of torch that hand the weights of their linear layers to one fused function
TORCH_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# reads its own weight, but only the dtype: there is a low-bit layer for it
# linear classes that spell the product out instead of calling their parent
PLAIN_PRODUCTS = (
    "hidden_states = input @ self.weight.T\nif self.bias is None:\n    return hidden_states\n"
    "return hidden_states + self.bias",
)
# marks a path that stands for the first parameter below it
FIRST_PARAMETER = "()"
SCALED_FORWARD = "return super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)"
# branches that only exist for a simulated tensor-parallel checkpoint layout, off unless the config says otherwise
LAYOUT_SWITCH = "pretraining_tp"


def directly_read(model: nn.Module) -> dict[str, str]:
    """{module name: class that reads its weight}; a module that reads its own weight is named itself."""
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        for path in _reads(type(module)):
            for name in _expand(module, path):
                found.setdefault(".".join(part for part in (prefix, name) if part), type(module).__name__)
    return found


def _expand(module: nn.Module, path: str) -> list[str]:
    """Replace the `*` of a loop over children by the children's names."""
    if path.endswith(FIRST_PARAMETER):
        path = path.removesuffix(FIRST_PARAMETER)
        part = dict(module.named_modules()).get(path)
        first = next((name for name, _ in part.named_parameters()), None) if part is not None else None
        return [".".join(p for p in (path, first.rpartition(".")[0]) if p)] if first else []
    before, star, after = path.partition(".*")
    if not star:
        return [path]
    children = dict(module.named_modules()).get(before)
    return [f"{before}.{name}{after}" for name, _ in children.named_children()] if children is not None else []


def reads_own_weight(cls: type, stop: type) -> bool:
    """Does a subclass of `stop` use `self.weight` in code of its own?"""
    return any("" in _class_reads(c) for c in cls.__mro__[: cls.__mro__.index(stop)])


def is_plain_product(cls: type) -> bool:
    """Is the forward of this linear class x W^T + bias, spelled out (Falcon)?"""
    return _forward_body(cls) in PLAIN_PRODUCTS


def only_scales(cls: type) -> bool:
    """Is the forward of this embedding class its parent's times `embed_scale`, and nothing more (the Gemma family)?"""
    return _forward_body(cls) == SCALED_FORWARD


def _forward_body(cls: type) -> str:
    """The code of `cls.forward` in one spelling; empty when there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    except (OSError, TypeError, SyntaxError):
        return ""
    return "\n".join(ast.unparse(step) for step in tree.body[0].body)


def _reads(cls: type) -> list[str]:
    if cls.__module__.startswith("torch.nn.") and cls not in TORCH_READERS:
        return []
    classes = [c for c in cls.__mro__ if c.__module__.split(".")[0] not in ("builtins", "abc")]
    classes = [c for c in classes if not c.__module__.startswith(("torch.", "hf_lowbit")) or c in TORCH_READERS]
    overridden: set[str] = set()
    paths: list[str] = []
    for c in classes:
        paths += [path for method, path in _method_reads(c) if path and method not in overridden]
        overridden |= set(vars(c))
    return paths


def _class_reads(cls: type) -> set[str]:
    return {path for _, path in _method_reads(cls)}


@cache
def _method_reads(cls: type) -> tuple[tuple[str, str], ...]:
    """(method, path) of every read in the class's own methods; the path "" is the module itself."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        # built at run time, or source not shipped: nothing to search
        return ()
    found = []
    for method in ast.walk(tree):
        if not isinstance(method, ast.FunctionDef) or method.name in NOT_FORWARD:
            continue
        if method.name.strip("_").startswith(INITIALIZERS):
            continue
        text = ast.unparse(method)
        if "torch.int8" in text or LAYOUT_SWITCH in text:
            continue
        nodes, loops = list(_inference_nodes(method)), _loops(method)
        harmless = {id(n.value) for n in nodes if isinstance(n, ast.Attribute) and n.attr == "device"}
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr == "weight" and id(node) not in harmless:
                path = _path_from_self(node.value, loops)
                if path is not None and isinstance(node.ctx, ast.Load):
                    found.append((method.name, path))
            elif isinstance(node, ast.Call) and id(node) not in harmless and ast.unparse(node.func) == "next":
                found += [(method.name, path) for path in _first_parameter(node, loops)]
    return tuple(dict.fromkeys(found))


def _inference_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below `node`, without the bodies of `if self.training ...:` (fused training kernels of state-space
    models)."""
    yield node
    if isinstance(node, ast.If) and any(
        isinstance(n, ast.Attribute) and n.attr == "training" for n in ast.walk(node.test)
    ):
        children = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from _inference_nodes(child)


def _first_parameter(call: ast.Call, loops: dict[str, str]) -> list[str]:
    """The path of `next(self.mlp.parameters())`, marked as standing for the first parameter below it."""
    inner = call.args[0] if call.args else None
    if not isinstance(inner, ast.Call) or getattr(inner.func, "attr", "") != "parameters":
        return []
    path = _path_from_self(inner.func.value, loops)
    return [] if path is None else [path + FIRST_PARAMETER]


def _loops(method: ast.FunctionDef) -> dict[str, str]:
    """{variable: "layers.*"} of every `for variable in self.layers`, also inside `enumerate`."""
    loops = {}
    for node in ast.walk(method):
        if isinstance(node, ast.For):
            source, target = node.iter, node.target
            if isinstance(source, ast.Call) and getattr(source.func, "id", "") == "enumerate" and source.args:
                source, target = source.args[0], target.elts[-1] if isinstance(target, ast.Tuple) else target
            path = _path_from_self(source, {})
            if path and isinstance(target, ast.Name):
                loops[target.id] = f"{path}.*"
    return loops


def _path_from_self(node: ast.expr, loops: dict[str, str]) -> str | None:
    """Dotted path of `self.a.b[0].c`, or of `block.c` in a loop; None when it starts elsewhere or an index is
    computed."""
    parts: list[str] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            parts.append(str(node.slice.value))
            node = node.value
        else:
            return None
    if node.id in loops:
        parts.append(loops[node.id])
    elif node.id != "self":
        return None
    return ".".join(reversed(parts))
