"""Gate and up with one mask as one product on a CPU: `python -m benchmarks.shared_mask`, one thread.

    two   silu(x G^T) * (x U^T), a call of the C library for each weight
    op    the operator `block_swiglu`, which calls the library for each weight too, but is called once itself
    one   the same from one call on [G; U], the block rows of both one after the other, held together in memory

`ratio` is two / (op, one) of the median seconds, in one interleaved loop: above 1 the latter is faster. Weights
stand in rings larger than the caches. Masks are row-balanced and random, 90 % of the blocks of 64 x 64 are dead.

Writes benchmarks/results/shared_mask.json; what a busy machine measures is not recorded (`record.is_quiet`).
"""

import argparse
import sys

import torch
import torch.nn.functional as F

import hf_lowbit.kernels  # noqa: F401
from benchmarks.blocks import DTYPES, RING_BYTES, random_blocks
from benchmarks.linear import medians
from benchmarks.record import Record, is_quiet, stream_gb_per_s, watch
from hf_lowbit.functional.block_swiglu import block_swiglu
from hf_lowbit.functional.blocks import block_linear


SHAPES, ROWS, SPARSITY, BLOCK = ((8192, 2048), (1536, 576)), (1, 4, 16, 64, 512), 0.9, 64


def candidates(shape: tuple[int, int], dtype: torch.dtype) -> dict:
    """name -> function(x, i)."""
    gates = [random_blocks(shape, BLOCK, SPARSITY, dtype)]
    count = max(2, round(RING_BYTES / (2 * gates[0][0].nbytes)))
    gates += [random_blocks(shape, BLOCK, SPARSITY, dtype) for _ in range(count - 1)]
    ups = [torch.randn_like(values) * 0.02 for values, _ in gates]
    both = [
        (torch.cat([values, up]), torch.cat([columns, columns]))
        for (values, columns), up in zip(gates, ups, strict=True)
    ]

    def two(x, i):
        (gate, columns), up = gates[i % count], ups[i % count]
        return F.silu(block_linear(x, gate, columns, None, shape[1])) * block_linear(x, up, columns, None, shape[1])

    def op(x, i):
        (gate, columns), up = gates[i % count], ups[i % count]
        return block_swiglu(x, gate, up, columns, shape[1])

    def one(x, i):
        g, u = block_linear(x, *both[i % count], None, shape[1]).chunk(2, dim=-1)
        return F.silu(g) * u

    return {"two": two, "op": op, "one": one}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--restart", action="store_true", help="forget earlier results")
    parser.add_argument("--show", action="store_true", help="print what a busy machine measures; it isn't recorded")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    protocol = {"shapes": SHAPES, "rows": ROWS, "sparsity": SPARSITY, "block": BLOCK, "threads": 1}
    record = Record("shared_mask", protocol, arguments.restart)
    for name, dtype in DTYPES.items():
        for shape in SHAPES:
            keys = {rows: f"{name} {shape[0]}x{shape[1]} M={rows}" for rows in ROWS}
            if all(key in record.rows for key in keys.values()):
                continue
            functions = candidates(shape, dtype)
            for rows, key in keys.items():
                if key in record.rows:
                    continue
                x = torch.randn(rows, shape[1]).to(dtype)
                for other in ("op", "one"):
                    torch.testing.assert_close(functions[other](x, 1), functions["two"](x, 1), atol=1e-2, rtol=1e-2)
                with watch() as spent, torch.no_grad():
                    stream = stream_gb_per_s()
                    seconds = medians(functions, x)
                ratio = {name: round(seconds["two"] / seconds[name], 2) for name in ("op", "one")}
                quiet = is_quiet(spent.others, stream)
                if quiet or arguments.show:
                    print(key, ratio, "" if quiet else "(busy, not recorded)", flush=True)
                if quiet:
                    spans = {n: round(s * 1e3, 4) for n, s in seconds.items()}
                    record.add(key, {"stream": round(stream, 1), "others": round(spent.others or 0.0, 2), "ms": spans,
                                     "ratio": ratio})  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
