"""How near our layers come to what this machine can do: measured ceilings, intensities, attained shares.

    python -m benchmarks.roofline

Ceilings, one thread, the best of REPEATS: products of EDGE x EDGE matrices by torch in float32, bfloat16 and int8
(`torch._int_mm`); memory by a triad a = b + s c of arrays larger than the caches, and by reading weights
(`record.stream_gb_per_s`), whose larger one is the roof; a file that is read from the page cache, and all-reduces of
two gloo processes. Layers: all schemes of `benchmarks/linear.py`, dense and block-sparse ones, by rows of x;
`benchmarks/roofline_layers.py` has the equations.

Everything is time, so a busy machine measures nothing. Writes benchmarks/results/roofline.json and is plotted by
`benchmarks/plots.py`.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

import hf_lowbit.kernels  # noqa: F401
from benchmarks import scaling
from benchmarks.linear import medians
from benchmarks.record import Record, is_quiet, stream_gb_per_s, watch
from benchmarks.roofline_layers import NAMES, Work, layer, work


SHAPE, ROWS = (2048, 2048), (1, 8, 64, 512)
EDGE, TRIAD_BYTES, FILE_BYTES, REDUCE_BYTES, REPEATS = 1024, 256e6, 256e6, 1 << 24, 7
# of all weights of a ring, more than the caches hold
RING_WEIGHTS = 100e6


def best(action, repeats: int = REPEATS) -> float:
    """Fewest seconds of `action`: a ceiling is what can be reached."""
    found = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        action()
        found.append(time.perf_counter() - begin)
    # the first call chose a kernel
    return min(found[1:])


def compute_ceilings(edge: int = EDGE) -> dict[str, float]:
    """dtype -> operations a second."""
    one, other = torch.randn(edge, edge), torch.randn(edge, edge)
    half = one.bfloat16(), other.bfloat16()
    whole = one.mul(40).round().clamp(-127, 127).char(), other.mul(40).round().clamp(-127, 127).char()
    actions = {
        "fp32": lambda: torch.mm(one, other),
        "bf16": lambda: torch.mm(*half),
        "int8": lambda: torch._int_mm(*whole),
    }
    return {name: 2.0 * edge**3 / best(action) for name, action in actions.items()}


def triad_bandwidth(size: float = TRIAD_BYTES) -> float:
    """Bytes a second of a = b + s c: two arrays read, one written."""
    count = int(size) // 12
    a, b, c = (torch.zeros(count) for _ in range(3))
    return 12 * count / best(lambda: torch.add(b, c, alpha=3.0, out=a))


def file_bandwidth(size: float = FILE_BYTES) -> float:
    """Bytes a second of a file that was just written: the page cache's, an upper bound of the disk's."""
    with tempfile.TemporaryDirectory() as folder:
        path, buffer = Path(folder) / "data", bytearray(int(size))
        path.write_bytes(buffer)

        def read():
            with path.open("rb", buffering=0) as stream:
                stream.readinto(buffer)

        return len(buffer) / best(read)


def network_bandwidth(size: int = REDUCE_BYTES) -> float:
    """Bytes of gradients a second of an all-reduce of two processes."""
    job = {"kind": "reduces", "bytes": [size], "world": 2, "size": "0.3M", "repeats": REPEATS}
    return size / scaling.run(job)["seconds"][str(size)]


CEILINGS = {
    "compute": compute_ceilings,
    "triad": triad_bandwidth,
    "stream": lambda: 1e9 * stream_gb_per_s(),
    "file": file_bandwidth,
    "all-reduce": network_bandwidth,
}


def measure_layer(name: str, shape: tuple[int, int], rows: tuple[int, ...], weights: float = RING_WEIGHTS) -> dict:
    """rows -> operations, bytes, seconds."""
    function, size, live, dtype, word = layer(name, shape, max(2, round(weights / (shape[0] * shape[1]))))
    found = {}
    for many in rows:
        asked = work(shape, many, size, live, dtype, word)
        seconds = medians({name: function}, torch.randn(many, shape[1]).to(dtype))[name]
        found[many] = {
            "operations": asked.operations, "weight_bytes": asked.weight_bytes, "data_bytes": asked.data_bytes,
            "multiplied": asked.multiplied, "intensity": round(asked.intensity, 4), "seconds": seconds,
        }  # fmt: skip
    return found


def attained(rows: dict) -> list[tuple[str, str, dict, float, str, float]]:
    """(layer, rows of x, figures, bound, which ceiling, share of it) of all layers."""
    compute = rows["compute"]["value"]
    bandwidth = max(rows["triad"]["value"], rows["stream"]["value"])
    found = []
    for name in NAMES:
        for many, figures in rows.get(name, {}).get("rows", {}).items():
            asked = Work(*(figures[part] for part in ("operations", "weight_bytes", "data_bytes", "multiplied")))
            bound, ceiling = asked.bound(compute, bandwidth)
            found.append((name, many, figures, bound, ceiling, figures["operations"] / figures["seconds"] / bound))
    return found


def summary(rows: dict) -> str:
    if any(name not in rows for name in CEILINGS):
        return "ceilings are missing: measure on a quiet machine."
    words = ", ".join(f"{name} {value / 1e9:.0f}" for name, value in rows["compute"]["value"].items())
    lines = [f"GFLOP/s or GOP/s: {words}"]
    lines += [f"{name}: {rows[name]['value'] / 1e9:.2f} GB/s" for name in CEILINGS if name != "compute"]
    lines.append(f"{'layer':28}{'M':>5}{'op/byte':>9}{'Gop/s':>9}{'bound':>9}  {'ceiling':9}{'attained':>9}")
    for name, many, figures, bound, ceiling, share in attained(rows):
        speed = figures["operations"] / figures["seconds"]
        lines.append(f"{name:28}{many:>5}{figures['intensity']:>9.2f}{speed / 1e9:>9.1f}{bound / 1e9:>9.1f}  "
                     f"{ceiling:9}{share:>9.0%}")  # fmt: skip
    return "\n".join(lines)


def main(arguments) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    protocol = {
        "shape": SHAPE, "rows": ROWS, "layers": NAMES, "edge": EDGE, "triad_bytes": TRIAD_BYTES,
        "file_bytes": FILE_BYTES, "reduce_bytes": REDUCE_BYTES, "repeats": REPEATS, "ring": RING_WEIGHTS, "threads": 1,
    }  # fmt: skip
    record = Record("roofline", protocol, arguments.restart)
    actions = {name: lambda ceiling=ceiling: {"value": ceiling()} for name, ceiling in CEILINGS.items()}
    actions |= {name: lambda name=name: {"rows": measure_layer(name, SHAPE, ROWS)} for name in NAMES}
    print(f"{len(actions)} measurements, of which {len(record.rows)} are done; about 20 seconds each.")
    for name, action in tqdm(actions.items()):
        if name in record.rows:
            continue
        with watch() as spent, torch.no_grad():
            figures = action()
        if is_quiet(spent.others):
            record.add(name, {**figures, "others": spent.others})
        else:
            print(f"{name}: thrown away, others used {spent.others:.1f} cores meanwhile.")
    print(summary(record.rows))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true")
    sys.exit(main(parser.parse_args()))
