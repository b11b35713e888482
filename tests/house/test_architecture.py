"""The shape of the code: imports point one way, files stay small, every module says what it is for.

The rules are functions from a file's path and source to a list of sentences, one per violation. Each is run over the
repository, and over a small source that breaks it, so that a rule which no longer sees anything is noticed.
"""

import ast
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
PACKAGE = "hf_lowbit"
MAX_LINES = 300

# a folder may import from those above its own line, never from its own line's neighbours or from below
LAYERS = (
    ("configs", "functional"),
    ("kernels",),
    ("nn",),
    ("sparsity", "training"),
    ("compression",),
    ("quantizers",),
    ("pipeline",),
    ("exports", "hub"),
    ("imports",),
    ("cli",),
    ("registration",),
)
LEVEL = {folder: level for level, folders in enumerate(LAYERS) for folder in folders}
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers", "misc", "common"}


def python_files():
    """All Python files of the repository; environments and caches are not part of it."""
    found = list(ROOT.glob("*.py"))
    for folder in (PACKAGE, "tests", "examples", "benchmarks", "scripts"):
        found += (ROOT / folder).rglob("*.py")
    return sorted(path.relative_to(ROOT) for path in found)


FILES = python_files()
PACKAGE_FILES = [path for path in FILES if path.parts[0] == PACKAGE]


def our_imports(path, tree):
    """Folders (or modules) right below the package that `path` imports, anywhere in it: (line, name)."""
    package = path.with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            # `from hf_lowbit import nn` and `from .. import nn` name the folder among the imported names
            targets = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for target in targets:
            if target[0] == PACKAGE:
                yield node.lineno, target[1] if len(target) > 1 else PACKAGE


def wrong_imports(path, source):
    folder = path.parts[1].removesuffix(".py")
    if folder == "__init__":
        return []
    if folder not in LEVEL:
        return [f"{path}: {folder!r} has no place in the import order; add it to LAYERS and to docs/architecture.md"]
    found = []
    for line, name in our_imports(path, ast.parse(source)):
        if name == folder:
            continue
        if name not in LEVEL:
            found.append(f"{path}:{line}: imports {name!r} of {PACKAGE}; import it from the folder that defines it")
        elif LEVEL[name] >= LEVEL[folder]:
            found.append(f"{path}:{line}: {folder} must not import {name}")
    return found


def swallowed_exceptions(path, source):
    """A broad except whose body does nothing hides every error, those of tomorrow included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException")
            if broad and all(isinstance(step, (ast.Pass, ast.Continue)) or is_literal(step) for step in node.body):
                found.append(f"{path}:{node.lineno}: a broad `except` that swallows; name the exception or handle it")
    return found


def is_literal(step):
    return isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant)


def missing_docstring(path, source):
    tree = ast.parse(source)
    if not tree.body or len((ast.get_docstring(tree) or "").split()) >= 4:
        return []
    return [f"{path}: the module docstring is missing, or is no sentence"]


def too_long(path, source):
    lines = source.count("\n")
    return [f"{path}: {lines} lines, more than {MAX_LINES}; split it by idea"] if lines > MAX_LINES else []


def vague_names(path, source):
    """Names that say nothing, of files, folders and classes; a class in a test may be about a helper."""
    found = [f"{path}: {part!r} says nothing" for part in path.with_suffix("").parts if part in VAGUE_NAMES]
    for node in ast.walk(ast.parse(source)) if path.parts[0] != "tests" else ():
        if isinstance(node, ast.ClassDef) and node.name.lower().endswith(tuple(VAGUE_NAMES)):
            found.append(f"{path}:{node.lineno}: class {node.name!r} says nothing")
    return found


@pytest.mark.parametrize(
    ("rule", "files"),
    [
        pytest.param(wrong_imports, PACKAGE_FILES, id="imports-point-one-way"),
        pytest.param(swallowed_exceptions, FILES, id="no-error-is-swallowed"),
        pytest.param(missing_docstring, FILES, id="modules-say-what-they-are-for"),
        pytest.param(too_long, FILES, id="files-are-small"),
        pytest.param(vague_names, FILES, id="names-mean-something"),
    ],
)
def test_rule_holds(rule, files):
    violations = [line for path in files for line in rule(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert not violations, "\n" + "\n".join(violations)


def test_the_package_is_seen():
    assert Path("hf_lowbit/functional/grid.py") in PACKAGE_FILES
    assert Path("_hf_lowbit_autoload.py") in FILES


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        pytest.param(wrong_imports, "hf_lowbit/functional/x.py", "import hf_lowbit.nn.linear", id="absolute"),
        pytest.param(wrong_imports, "hf_lowbit/functional/x.py", "from ..nn import linear", id="relative"),
        pytest.param(wrong_imports, "hf_lowbit/functional/x.py", "from .. import nn", id="relative-folder"),
        pytest.param(wrong_imports, "hf_lowbit/functional/x.py", "from hf_lowbit import nn", id="from-package"),
        pytest.param(wrong_imports, "hf_lowbit/functional/a/x.py", "from ...nn import linear", id="nested"),
        pytest.param(wrong_imports, "hf_lowbit/nn/x.py", "def f():\n    from ..hub import card", id="in-function"),
        pytest.param(wrong_imports, "hf_lowbit/functional/x.py", "from ..configs import Scheme", id="neighbour"),
        pytest.param(wrong_imports, "hf_lowbit/compression/x.py", "from ..quantizers import auto", id="upwards"),
        pytest.param(wrong_imports, "hf_lowbit/cli/x.py", "import hf_lowbit", id="whole-package"),
        pytest.param(wrong_imports, "hf_lowbit/cli/x.py", "from hf_lowbit import LowBitConfig", id="public-name"),
        pytest.param(wrong_imports, "hf_lowbit/new/x.py", "", id="unknown-folder"),
        pytest.param(swallowed_exceptions, "x.py", "try:\n    f()\nexcept Exception:\n    pass", id="pass"),
        pytest.param(swallowed_exceptions, "x.py", "try:\n    f()\nexcept:\n    'why not'", id="bare"),
        pytest.param(missing_docstring, "x.py", "import os", id="no-docstring"),
        pytest.param(missing_docstring, "x.py", '"""Tests."""\nimport os', id="docstring-without-content"),
        pytest.param(too_long, "x.py", "\n" * (MAX_LINES + 1), id="long"),
        pytest.param(vague_names, "hf_lowbit/nn/utils.py", "", id="file"),
        pytest.param(vague_names, "x.py", "class CacheManager:\n    pass", id="class"),
    ],
)
def test_rule_sees_a_violation(rule, path, source):
    assert len(rule(Path(path), source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        pytest.param("hf_lowbit/quantizers/x.py", "from ..compression import engine", id="downwards"),
        pytest.param("hf_lowbit/nn/x.py", "from .linear import Linear\nfrom . import swap", id="same-folder"),
        pytest.param("hf_lowbit/nn/x.py", "from ..functional.grid import levels", id="deeper-module"),
        pytest.param("hf_lowbit/functional/x.py", "import torch.nn\nfrom torch import nn", id="torch"),
        pytest.param("hf_lowbit/__init__.py", "from .quantizers import register", id="package"),
    ],
)
def test_import_order_allows(path, source):
    assert wrong_imports(Path(path), source) == []
