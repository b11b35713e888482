"""Documents keep their word: the code blocks of README.md and docs/ run as they stand.

All ```python blocks of a document form one program, in their order, run in a fresh interpreter in an empty directory.
A block under the comment `<!-- not tested: reason -->` is left out, and there may be only a few of those. A ```bash
block under `<!-- tested -->` is run; of every other bash block the syntax is checked, that the make targets exist, and
that the files of this repository that it names do.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest


ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.exists()
]
# a document whose blocks are mostly exempt proves nothing
MAX_SKIPPED = 2
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>tested|not tested: [^\n]+?) -->\n+)?^```(?P<language>[a-z]+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    mark: str  # "", "tested" or "not tested: reason"
    language: str
    code: str
    line: int  # of its first line of code, from 1


def blocks(text, language):
    found = []
    for match in BLOCK.finditer(text):
        if match["language"] == language:
            line = text.count("\n", 0, match.start("code")) + 1
            found.append(Block(match["mark"] or "", language, match["code"], line))
    return found


def is_skipped(block):
    return block.mark.startswith("not tested")


def program(text):
    """The python blocks at their own line numbers, so that a traceback names the line of the document."""
    lines = [""] * (text.count("\n") + 1)
    for block in blocks(text, "python"):
        if not is_skipped(block):
            code = block.code.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    return "\n".join(lines)


def run(command, cwd):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def unknown_words(code):
    """Make targets and repository files in a bash block that do not exist."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    unknown = []
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            unknown += [f"make {word}" for word in words[1:] if "=" not in word and word not in targets]
        for word in words:
            if word.startswith(("scripts/", "examples/", "benchmarks/", "tests/", "docs/")):
                unknown += [] if (ROOT / word).exists() else [word]
    return unknown


def documents_with(language):
    found = [path for path in DOCUMENTS if blocks(path.read_text(encoding="utf-8"), language)]
    return [pytest.param(path.read_text(encoding="utf-8"), id=str(path.relative_to(ROOT))) for path in found]


@pytest.mark.parametrize("text", documents_with("python"))
def test_python_blocks_run(text, tmp_path):
    script = tmp_path / "document.py"
    script.write_text(program(text), encoding="utf-8")
    (tmp_path / "empty").mkdir()
    run([sys.executable, str(script)], tmp_path / "empty")


@pytest.mark.parametrize("text", documents_with("bash"))
def test_bash_blocks_are_right(text, tmp_path):
    for block in blocks(text, "bash"):
        run(["bash", "-n", "-c", block.code], tmp_path)
        assert unknown_words(block.code) == [], f"line {block.line}"
        if block.mark == "tested":
            run(["bash", "-euo", "pipefail", "-c", block.code], tmp_path)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_few_blocks_are_exempt(path):
    text = path.read_text(encoding="utf-8")
    assert sum(is_skipped(block) for block in blocks(text, "python")) <= MAX_SKIPPED


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_into_the_repository_exist(path):
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", path.read_text(encoding="utf-8"))
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_readme_has_code_that_runs():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "hf_lowbit" in program(text)
    assert any("make test" in block.code for block in blocks(text, "bash"))


SAMPLE = """# Title

```python
x = 1
```

<!-- not tested: needs a network -->
```python
raise SystemExit("must not run")
```

```bash
make nonsense
python scripts/nothing.py
```

<!-- tested -->

```bash
true
```

```python
assert x == 2
```
"""


def test_blocks_share_a_program_and_keep_their_lines(tmp_path):
    script = tmp_path / "sample.py"
    script.write_text(program(SAMPLE))
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert "AssertionError" in result.stderr
    assert f"line {SAMPLE[: SAMPLE.index('assert x')].count(chr(10)) + 1}" in result.stderr


def test_marks_and_unknown_words_are_seen():
    first, second = blocks(SAMPLE, "bash")
    assert (first.mark, second.mark) == ("", "tested")
    assert unknown_words(first.code) == ["make nonsense", "scripts/nothing.py"]
    assert [is_skipped(block) for block in blocks(SAMPLE, "python")] == [False, True, False]
