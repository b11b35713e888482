"""What loading a model takes: `python -m benchmarks.memory FOLDER [CONFIG]` in a process of its own, as JSON.

    weights      bytes of all parameters and buffers: the packed weights and what stayed dense
    resident     memory of the process after loading and reading every weight once, less that before
    mapped       the part of it that is pages of the checkpoint's files, which the system may drop and read again
    peak         the most memory without such pages while loading, sampled, less that before it

Before means: the model's code is imported. CONFIG is the JSON of a quantization config for a dense FOLDER. Linux only.
"""

import gc
import json
import subprocess
import sys
import threading
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
SAMPLE_SECONDS = 0.002


def now(field: str) -> int:
    """Bytes: `VmRSS` all resident memory, `RssAnon` that without files, `RssFile` that of files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(field + ":")))


class Peak(threading.Thread):
    """The largest `RssAnon` until `stop`."""

    def __init__(self):
        super().__init__(daemon=True)
        self.bytes, self.done = 0, threading.Event()

    def run(self):
        while not self.done.wait(SAMPLE_SECONDS):
            self.bytes = max(self.bytes, now("RssAnon"))

    def stop(self) -> int:
        self.done.set()
        self.join()
        return max(self.bytes, now("RssAnon"))


def load(folder: str, config: dict | None) -> dict[str, int]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import hf_lowbit  # noqa: F401

    # what the first model of a process brings in is no part of this one
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    torch.nn.Linear(64, 64, dtype=torch.bfloat16)(torch.ones(64, 64, dtype=torch.bfloat16))
    gc.collect()
    before = {field: now(field) for field in ("VmRSS", "RssAnon", "RssFile")}
    peak = Peak()
    peak.start()
    options = {} if config is None else {"quantization_config": config}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    highest = peak.stop()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().view(-1).view(torch.uint8).max() if tensor.numel() else None
    gc.collect()
    sizes = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return {
        "weights": sum(sizes.values()),
        "resident": now("VmRSS") - before["VmRSS"],
        "mapped": now("RssFile") - before["RssFile"],
        "peak": highest - before["RssAnon"],
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
