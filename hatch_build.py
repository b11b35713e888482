"""Compiles the optional CPU kernels when a wheel is built, and builds a pure Python wheel when it cannot.

One C file without Python and torch headers: the library serves every Python and every torch, so a wheel that contains
it is tagged `py3-none-<platform>`. A missing compiler, a missing source or `HF_LOWBIT_NO_C=1` is no error: the package
then computes with torch alone, and the build log says why. `HF_LOWBIT_REQUIRE_C=1` makes it an error, for those who
build wheels for others.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


SOURCES = Path("hf_lowbit", "csrc")
LIBRARY = Path("hf_lowbit", "_lowbit_cpu.so")
# no -march=native: the code chooses by what the processor reports at run time, and a wheel may run elsewhere; -std=c11
# keeps compilers from fusing roundings
FLAGS = ["-O2", "-ftree-vectorize", "-std=c11", "-fPIC", "-fvisibility=hidden", "-pthread"]
# tried in this order: GCC takes the first, clang has no cost model, Apple's no OpenMP (it shares torch's threads)
OPTIONAL_FLAGS = (["-fvect-cost-model=dynamic", "-fopenmp"], ["-fopenmp"], [])


class NotCompiled(Exception):
    """Says in a sentence why there is no compiled library."""


class CompileKernels(BuildHookInterface):
    def initialize(self, version, build_data):
        self.scratch = tempfile.mkdtemp(prefix="hf_lowbit-")
        built = Path(self.scratch, LIBRARY.name)
        in_tree = Path(self.root, LIBRARY)
        try:
            command = compile_library(Path(self.root, SOURCES), built)
        except NotCompiled as reason:
            if is_set("HF_LOWBIT_REQUIRE_C"):
                raise
            if version == "editable":
                # a library from an earlier build no longer belongs to this source
                in_tree.unlink(missing_ok=True)
            self.app.display_warning(f"hf_lowbit is built without its C kernels: {reason}")
            return

        self.app.display_info(f"hf_lowbit compiled its C kernels: {shlex.join(command)}")
        if version == "editable":
            # moved, not written in place: a process that has the old library open keeps it
            shutil.copy(built, in_tree.with_suffix(".new"))
            os.replace(in_tree.with_suffix(".new"), in_tree)
        else:
            build_data["force_include"][str(built)] = LIBRARY.as_posix()
            build_data["pure_python"] = False
            platform = self.build_config.builder.get_best_matching_tag().rsplit("-", 1)[1]
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version, build_data, artifact_path):
        shutil.rmtree(self.scratch, ignore_errors=True)


def is_set(variable):
    return os.environ.get(variable, "") not in ("", "0")


def compile_library(folder, target):
    """Compile the C files of `folder` to `target`, at once, and return the command that linked them.

    Raises NotCompiled where that is impossible.
    """
    if is_set("HF_LOWBIT_NO_C"):
        raise NotCompiled("HF_LOWBIT_NO_C is set.")
    if sys.platform == "win32":
        raise NotCompiled("they are not built on Windows.")
    sources = sorted(folder.glob("*.c"))
    if not sources:
        raise NotCompiled(f"there is no C file in {folder}.")
    compiler = find_compiler()
    parts = [f"{target}.{source.stem}.o" for source in sources]
    for optional in OPTIONAL_FLAGS:
        begin = [*compiler, *FLAGS, *optional]
        compilations = [
            subprocess.Popen([*begin, "-c", str(source), "-o", part], stderr=subprocess.PIPE, text=True)
            for source, part in zip(sources, parts, strict=True)
        ]
        complaint = "".join([compilation.communicate()[1] for compilation in compilations])
        if any(compilation.returncode for compilation in compilations):
            continue
        command = [*begin, "-shared", *parts, "-o", str(target), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            return command
        complaint = result.stderr
    raise NotCompiled(f"`{shlex.join([*begin, *map(str, sources)])}` failed with:\n{complaint.strip()}")


def find_compiler():
    """The first of $CC, cc, gcc and clang that exists, as a command line."""
    candidates = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    for candidate in candidates:
        if candidate and shutil.which(candidate[0]):
            return candidate
    tried = ", ".join(candidate[0] for candidate in candidates if candidate)
    raise NotCompiled(f"no C compiler was found (tried {tried}).")
