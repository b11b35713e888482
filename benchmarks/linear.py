"""How fast one low-bit linear product is: `python -m benchmarks.linear`, one thread, against torch's dense one.

    ratio = median seconds of F.linear / median seconds of the low-bit product,   both in one interleaved loop

where F.linear is bfloat16, as x is, and float32 on tiers whose processors can't multiply that (WITHOUT_BFLOAT16).

Weights stand in a ring larger than the caches, so that each call reads its weights from memory, as a model does: a
ring of R matrices, call i uses matrix i mod R. Calls of all candidates alternate in random order; a disturbance hits
all alike. The time is that of `functional.linear`, what a layer calls, Python included.

A tier stands for processors that have no better one, so torch is held to its instructions too (TORCH_OF), in a process
of its own: that is what users there compare with. Candidates: every scheme below on every tier of this processor,
forced one by one; with `--peers` the layers of other libraries too, in the same loop (`peers/products.py`). A run on a
busy machine is not recorded: see `record.is_quiet`.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import hf_lowbit.kernels  # noqa: F401
from benchmarks.peers import products
from benchmarks.record import Record, is_quiet, stream_gb_per_s, watch
from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.functional.grid import grid_of, group_count
from hf_lowbit.functional.linear import linear
from hf_lowbit.functional.packing import pack
from hf_lowbit.kernels.cpu import TIERS, library


# (out_features, in_features): projections of a 135M and of a 1B model
SHAPES = [(576, 576), (1536, 576), (576, 1536), (2048, 2048), (8192, 2048), (2048, 8192)]
ROWS = (1, 8, 64, 512)
# name -> bits, group size, int8 activations
SCHEMES = {
    "ternary int8": ("ternary", "tensor", True),
    "int2 g64 int8": (2, 64, True),
    "int3 g64 int8": (3, 64, True),
    "int4 g64 int8": (4, 64, True),
    "int8 int8": (8, None, True),
    "int4 g64 float": (4, 64, False),
    "int8 float": (8, None, False),
    "ternary float": ("ternary", "tensor", False),
}
PARAMETERS = 150e6
# tier -> what keeps torch's libraries to the instructions of its processors
TORCH_OF = {
    "cpu-avx512vnni": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "cpu-avxvnni": {
        "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2",
    },
    "cpu-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}  # fmt: skip
# seconds for one shape and number of rows
BUDGET = 4.0
LEAST, MOST = 7, 200

WITHOUT_BFLOAT16 = ("cpu-avxvnni", "cpu-avx2")


def tiers() -> list[str]:
    """The kernels of this processor: those in C, the fastest first, and the one that needs torch alone."""
    loaded = library.load()
    if loaded.handle is None:
        print(f"There is no C library to measure: {loaded.reason}.")
        return ["torch-native"]
    return [*(n for n, (_, _, needed) in TIERS.items() if loaded.features & needed == needed), "torch-native"]


def packed_ring(bits, group, shape, count):
    """`count` copies of one packed weight: what they hold does not matter, where they lie does."""
    grid = grid_of(bits)
    scale_shape = (1, 1) if group == "tensor" else (shape[0], group_count(shape[1], group))
    scale = (torch.rand(scale_shape) + 0.5).to(torch.bfloat16 if isinstance(group, int) else torch.float32)
    weight = pack(torch.randint(grid.qmin, grid.qmax + 1, shape, dtype=torch.int8), grid)
    return [(weight.clone(), scale.clone()) for _ in range(count)]


def candidates(shape, count):
    """name -> function(x, i)."""
    dense = torch.randn(shape)
    rings = {"bf16": [dense.bfloat16() for _ in range(count)], "fp32": [dense.clone() for _ in range(count)]}
    found = {
        "bf16": lambda x, i: F.linear(x, rings["bf16"][i % count]),
        "fp32": lambda x, i: F.linear(x.float(), rings["fp32"][i % count]),
    }
    for name, (bits, group, int8) in SCHEMES.items():
        ring, size = packed_ring(bits, group, shape, count), group if isinstance(group, int) else None

        def product(x, i, ring=ring, bits=bits, size=size, int8=int8):
            weight, scale = ring[i % count]
            return linear(x, weight, scale, None, None, bits, shape[1], size, int8)

        found[name] = product
    return found


def medians(functions, x) -> dict[str, float]:
    """Median seconds a call, all functions in each round, in an order of the round's own.

    What ran before decides what is in the caches: the weights of a dense layer leave nothing of the code of the next.
    """
    begin = time.perf_counter()
    for function in functions.values():
        function(x, 0)
    once = time.perf_counter() - begin
    spent, order = {name: [] for name in functions}, random.Random(0)
    for i in range(1, 1 + max(LEAST, min(MOST, int(BUDGET / once)))):
        for name in order.sample(list(functions), len(functions)):
            begin = time.perf_counter()
            functions[name](x, i)
            spent[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in spent.items()}


def measure(record, tier, shape, parameters, others=None):
    """`others(shape, count)` gives further candidates, and why some are left out."""
    count = max(1, round(parameters / (shape[0] * shape[1])))
    functions = None
    for rows in ROWS:
        key = f"{tier} {shape[0]}x{shape[1]} M={rows}"
        if key in record.rows:
            continue
        if functions is None:
            functions, left_out = candidates(shape, count), {}
            if others is not None:
                further, left_out = others(shape, count)
                functions |= further
        x = torch.randn(rows, shape[1]).bfloat16()
        with use_kernel(tier):
            # a kernel that keeps copies makes them at the first call of each weight
            for i in range(count if tier == "torch-native" and rows < 512 else 1):
                for function in functions.values():
                    function(x, i)
        with watch() as spent, use_kernel(tier):
            # memory is as fast whatever the instructions are, but torch's bfloat16 needs AVX512 to show it
            stream = stream_gb_per_s() if "ATEN_CPU_CAPABILITY" not in TORCH_OF.get(tier, ()) else None
            seconds = medians(functions, x)
        if not is_quiet(spent.others, stream):
            print(f"{key}: thrown away, the machine is busy ({spent.others:.1f} cores, {stream} GB/s)", flush=True)
            continue
        dense = seconds["fp32" if tier in WITHOUT_BFLOAT16 else "bf16"]
        figures = {name: {"us": round(s * 1e6, 1), "ratio": round(dense / s, 2)} for name, s in seconds.items()}
        quiet = {"stream": stream and round(stream, 1), "others": round(spent.others or 0.0, 2)}
        record.add(key, {**quiet, "products": figures, "left_out": left_out})
        print(key, " ".join(f"{name}: {f['ratio']}" for name, f in figures.items()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--restart", action="store_true", help="forget earlier results")
    parser.add_argument("--tier", action="append", help="only these tiers")
    parser.add_argument("--peers", action="store_true", help="time other libraries' layers beside the first tier")
    parser.add_argument("--minutes", type=float, default=20.0, help="stop after so long; run again to continue")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    protocol = {
        "shapes": SHAPES,
        "rows": ROWS,
        "schemes": SCHEMES,
        "parameters": PARAMETERS,
        "threads": 1,
        "torch_of": TORCH_OF,
    }
    # rows with peers are rows of their own: another loop
    record = Record("linear-peers" if arguments.peers else "linear", protocol, arguments.restart)
    if arguments.restart:
        # a process of another tier continues the file
        record.save()
    chosen = arguments.tier or [name for name in tiers() if name != "cpu-portable"]
    chosen = chosen[:1] if arguments.peers else chosen
    others = products.candidates if arguments.peers else None
    print(f"{len(chosen)} tiers, {len(SHAPES)} shapes, {len(ROWS)} row counts: about "
          f"{len(chosen) * len(SHAPES) * len(ROWS) * (BUDGET + 3) / 60:.0f} minutes.", flush=True)  # fmt: skip
    until = time.perf_counter() + arguments.minutes * 60
    for tier in chosen:
        limits = TORCH_OF.get(tier, {})
        if any(os.environ.get(name) != value for name, value in limits.items()):
            # torch reads them when it starts
            left = f"--minutes={(until - time.perf_counter()) / 60:.1f}"
            command = [sys.executable, "-m", "benchmarks.linear", f"--tier={tier}", left]
            subprocess.run(command + ["--peers"] * arguments.peers, env={**os.environ, **limits}, check=True)
            record = Record(record.path.stem, protocol)
            continue
        for shape in SHAPES:
            if time.perf_counter() > until:
                print("Time is up; run this again to continue.")
                return 0
            measure(record, tier, shape, PARAMETERS, others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
