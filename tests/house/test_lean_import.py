"""`import hf_lowbit` costs a transformers user nothing but hf_lowbit: no other library comes with it."""

import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]
# where we are installed, the import hook is loaded with the interpreter
HOOK = {"_hf_lowbit_autoload"}
# the parts of transformers that any program which loads a model imports
TRANSFORMERS = "import torch, transformers.modeling_utils, transformers.quantizers.auto"
USE_EVERY_NAME = "import hf_lowbit; [getattr(hf_lowbit, name) for name in hf_lowbit.__all__ if 'Callback' not in name]"
# a callback is of a class of the Trainer's, which loads more: libraries that the Trainer needs anyway
TRAINER = f"{TRANSFORMERS}, transformers.trainer_callback"


def added(code, after="pass"):
    """Top-level packages that `code` loads in an interpreter that ran `after`; the standard library is left out."""
    program = f"import sys; {after}; before = set(sys.modules); {code}; print(*sorted(set(sys.modules) - before))"
    env = {**os.environ, "HF_LOWBIT_AUTOLOAD": "0", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return {name.partition(".")[0] for name in result.stdout.split()} - set(sys.stdlib_module_names)


def test_import_alone_loads_nothing_else():
    assert added("import hf_lowbit") - HOOK == {"hf_lowbit"}


def test_use_of_every_public_name_adds_nothing_to_transformers():
    assert added(USE_EVERY_NAME, after=TRANSFORMERS) - HOOK == {"hf_lowbit"}


def test_a_callback_adds_nothing_to_the_trainers():
    assert added("import hf_lowbit; hf_lowbit.DQTCallback", after=TRAINER) - HOOK == {"hf_lowbit"}


def test_a_library_would_be_seen():
    assert "hypothesis" in added("import hypothesis")
