"""`python -m benchmarks` (or `make bench`): every benchmark, one after the other, each in its own process.

Each one says first what it will cost, continues where it stopped, and stops after 20 minutes at most; run this again
until nothing is left. Arguments are the names of those to run; all when left out. Then the tables and plots of docs/
are made anew from what is there, which is all that `--tables` (or `make tables`) does.
"""

import subprocess
import sys
from pathlib import Path


FOLDER = Path(__file__).parent
NAMES = (
    "blocks",
    "shared_mask",
    "experts",
    "generate",
    "shared_input",
    "sparse_decode",
    "linear",
    "quality",
    "clip",
    "compress",
    "compress_encoder",
    "compress_speech",
    "propagation",
    "refine",
    "direct_training",
    "finetune_direct",
    "loftq",
    "training_memory",
    "update",
    "ternary_gap",
    "sparsity",
    "finetune_sparse",
    "time_to_quality",
    "throughput",
    "large_batch",
    "vision",
    "scaling",
    "roofline",
    "layerwise",
    "gpu",
)
RENDERERS = ("render", "render_training", "render_sparsity", "render_compress", "render_measurement", "plots")


def run(names: list[str]) -> int:
    if names != ["--tables"] and (unknown := sorted(set(names) - set(NAMES))):
        print(f"unknown benchmark {unknown[0]!r}; known: {', '.join(NAMES)}.")
        return 2
    failed = []
    tables = names == ["--tables"]
    for name in (*(() if tables else names or NAMES), *RENDERERS):
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=FOLDER.parent).returncode:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
