"""How fast low-bit linear products are on a CUDA device: `python -m benchmarks.gpu`, at the shapes of an 8B model.

    ratio = median time of bfloat16 F.linear / median time of the candidate,   both in one interleaved loop

Each candidate is captured in a CUDA graph over a ring of layers (`gpu_timing.py` says why).

Peers: bfloat16 (cuBLAS), torchao int4 (groups of 128), bitsandbytes nf4. One that is not installed or that fails is
left out, and the results say why. A row in which bfloat16 itself drifts by more than DRIFT is thrown away: the device
was busy, or changed its clock.

`--tune` times other shapes of tiles and writes a table for `hf_lowbit/kernels/triton/` (see `gpu_plans.py`).
"""

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import hf_lowbit.kernels  # noqa: F401
from benchmarks.gpu_plans import tune
from benchmarks.gpu_timing import (
    LEAST_RING_BYTES,
    MOST_LAYERS,
    REPLAYS,
    captured,
    device_ring,
    drift,
    interleaved,
    ring_length,
)
from benchmarks.record import Record
from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.functional.linear import linear
from hf_lowbit.kernels.triton import NAME, refuse_machine


# (out_features, in_features) of Llama-3.1-8B: q and o, k and v, gate and up, down
SHAPES = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
ROWS = (1, 4, 16, 32, 64, 256, 2048)
# name -> bits, group size, int8 activations
SCHEMES = {
    "ternary int8": ("ternary", "tensor", True),
    "int2 g64 float": (2, 64, False),
    "int3 g64 float": (3, 64, False),
    "int4 g128 float": (4, 128, False),
    "int4 g64 float": (4, 64, False),
    "int4 g128 int8": (4, 128, True),
    "int8 float": (8, None, False),
    "int8 int8": (8, None, True),
}
# between the halves of a row's measurement
DRIFT = 0.05


def card() -> str:
    """The device's name as part of a file's: "nvidia-h200"."""
    return slug(torch.cuda.get_device_name())


def slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def ours(scheme, shape, device):
    """function(x, i): the product with layer i of a ring."""
    bits, group, int8 = scheme
    size, ring = group if isinstance(group, int) else None, device_ring(bits, group, shape, device)

    def product(x, i):
        weight, scale = ring[i]
        return linear(x, weight, scale, None, None, bits, shape[1], size, int8)

    return product


def dense(shape, count, device):
    ring = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(count)]
    return lambda x, i: F.linear(x, ring[i])


def torchao_int4(shape, count, device):
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    layers = [
        torch.nn.Linear(shape[1], shape[0], bias=False, device=device, dtype=torch.bfloat16) for _ in range(count)
    ]
    for layer in layers:
        quantize_(layer, Int4WeightOnlyConfig(group_size=128))
    return lambda x, i: layers[i](x)


def bitsandbytes_nf4(shape, count, device):
    import bitsandbytes

    layers = []
    for _ in range(count):
        layer = bitsandbytes.nn.Linear4bit(
            shape[1], shape[0], bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        layers.append(layer.to(device))
    return lambda x, i: layers[i](x)


PEERS = {"torchao int4 g128": torchao_int4, "bitsandbytes nf4": bitsandbytes_nf4}


def measure(record: Record, shape: tuple[int, int]) -> None:
    """All rows of one shape that the record lacks."""
    device, count = torch.device("cuda"), ring_length(shape)
    missing = [rows for rows in ROWS if f"{shape[0]}x{shape[1]} M={rows}" not in record.rows]
    if not missing:
        return
    functions = {"bf16": dense(shape, count, device)}
    functions |= {name: ours(scheme, shape, device) for name, scheme in SCHEMES.items()}
    skipped = {}
    for name, build in PEERS.items():
        try:
            functions[name] = build(shape, count, device)
        except Exception as error:  # a peer's failure is a result too
            skipped[name] = f"{type(error).__name__}: {error}".split("\n")[0]
    for rows in missing:
        key = f"{shape[0]}x{shape[1]} M={rows}"
        x, graphs, left_out = torch.randn(rows, shape[1], device=device).bfloat16(), {}, dict(skipped)
        for name, function in functions.items():
            try:
                with use_kernel(NAME):
                    graphs[name] = captured(function, x, count)
            except Exception as error:
                if name not in PEERS:
                    raise
                left_out[name] = f"{type(error).__name__}: {error}".split("\n")[0]
        spent = interleaved(graphs, count)
        if drift(spent["bf16"]) > DRIFT:
            print(f"{key}: thrown away, bfloat16 drifted by {drift(spent['bf16']):.0%}", flush=True)
            continue
        medians = {name: statistics.median(seconds) for name, seconds in spent.items()}
        products = {n: {"us": round(s * 1e6, 2), "ratio": round(medians["bf16"] / s, 2)} for n, s in medians.items()}
        record.add(key, {"layers": count, "products": products, "left_out": left_out})
        print(key, " ".join(f"{n}: {f['ratio']}" for n, f in products.items()), *left_out.items(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--restart", action="store_true", help="forget earlier results of this card")
    parser.add_argument("--tune", action="store_true", help="time shapes of tiles and write this device's table")
    parser.add_argument("--minutes", type=float, default=20.0, help="stop after so long; run again to continue")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device: nothing to measure.")
        return 0
    if (refusal := refuse_machine()) is not None:
        print(f"The Triton kernels do not run here: {refusal}.")
        return 0
    torch.set_grad_enabled(False)
    until = time.perf_counter() + 60 * arguments.minutes
    if arguments.tune:
        return tune(SHAPES, until)
    protocol = {
        "shapes": SHAPES, "rows": ROWS, "schemes": SCHEMES, "peers": sorted(PEERS), "replays": REPLAYS,
        "ring bytes at 2 bits": LEAST_RING_BYTES, "most layers": MOST_LAYERS, "drift": DRIFT, "graphs": True,
    }  # fmt: skip
    record = Record(f"gpu-{card()}", protocol, arguments.restart)
    print(f"{len(SHAPES)} shapes, {len(ROWS)} row counts: about 10 minutes, most of them compiling.", flush=True)
    for shape in SHAPES:
        if time.perf_counter() > until:
            print("Time is up; run this again to continue.")
            break
        measure(record, shape)
    return 0


if __name__ == "__main__":
    sys.exit(main())
