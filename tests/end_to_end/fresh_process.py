"""Run a model in a Python process of its own, as a user does who comes back the next day."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor


ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch, transformers
import hf_lowbit
auto, folder, inputs, output = sys.argv[1:]
model = getattr(transformers, auto).from_pretrained(folder).eval()
with torch.inference_mode():
    torch.save(model(**torch.load(inputs))[0], output)
"""


def first_output(auto: str, folder: Path, inputs: dict[str, Tensor], scratch: Path) -> Tensor:
    """The first output of `auto`.from_pretrained(folder) for `inputs`, computed in a fresh process."""
    torch.save(inputs, scratch / "inputs.pt")
    command = [sys.executable, "-c", SCRIPT, auto, str(folder), str(scratch / "inputs.pt"), str(scratch / "output.pt")]
    # the same thread count: it decides the order of float sums
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return torch.load(scratch / "output.pt")


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
