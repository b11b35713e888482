"""What loading a model takes: `python -m benchmarks.memory FOLDER [CONFIG]` in a process of its own, as JSON.

    resident   resident memory after loading, less that before it
    peak       the largest resident memory meanwhile, less that before it
    weights    bytes of all parameters and buffers: the packed weights and what stayed dense

CONFIG is the JSON of a quantization config for a dense FOLDER. Linux only: the kernel keeps the peak.
"""

import gc
import json
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]


def resident(field: str) -> int:
    """Bytes: `VmRSS` now, `VmHWM` at most."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(field + ":")))


def load(folder: str, config: dict | None) -> dict[str, int]:
    import torch
    from transformers import AutoModelForCausalLM

    import hf_lowbit  # noqa: F401

    # what the first model of a process brings in is no part of this one
    torch.nn.Linear(64, 64, dtype=torch.bfloat16)(torch.ones(64, 64, dtype=torch.bfloat16))
    gc.collect()
    before = resident("VmRSS")
    options = {} if config is None else {"quantization_config": config}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    gc.collect()
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return {
        "resident": resident("VmRSS") - before,
        "peak": resident("VmHWM") - before,
        "weights": sum(tensors.values()),
    }


def measure(folder, config: dict | None = None) -> dict[str, int]:
    """`load` in a fresh process."""
    arguments = [str(folder)] if config is None else [str(folder), json.dumps(config)]
    command = [sys.executable, "-m", "benchmarks.memory", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"loading {folder} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(load(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else None)))
