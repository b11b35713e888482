"""How fast products with live blocks are: `python -m benchmarks.blocks`, one thread, against torch's dense product.

    ratio = median seconds of F.linear / median seconds of the product with live blocks,   in one interleaved loop

Masks are row-balanced and random. "forward" rows time the product alone, the C library ("blocks"), torch's batched
products ("torch") and torch's own block-sparse tensors ("bsr", float32 alone: it has no bfloat16), for several
numbers of rows of x. "codes" rows time low-bit live blocks, with float and with int8 activations, beside float ones.
"training" rows time a SwiGLU MLP forward and the gradients of x and of all three weights.
Weights of all candidates stand in rings larger than the caches, as in `linear.py`. `limit` is dense / live weights: no
product that multiplies each live weight once can be further ahead, unless the dense one falls short of the machine.
`of_limit` is the share of it that was reached.

Writes benchmarks/results/blocks.json; what a busy machine measures is not recorded (`record.is_quiet`).
"""

import argparse
import sys
import warnings
from contextlib import nullcontext

import torch
import torch.nn.functional as F

import hf_lowbit.kernels  # noqa: F401
from benchmarks.linear import medians
from benchmarks.record import Record, is_quiet, stream_gb_per_s, watch
from hf_lowbit.functional.block_code_linear import block_code_linear
from hf_lowbit.functional.block_codes import quantize_blocks
from hf_lowbit.functional.block_dispatch import BlockProblem, choose_blocks
from hf_lowbit.functional.block_masks import scatter
from hf_lowbit.functional.blocks import block_linear
from hf_lowbit.functional.dispatch import use_kernel


SHAPES = [(2048, 8192), (8192, 2048)]
BLOCKS = (32, 64, 128)
ROWS = {"bf16": (1, 64, 512), "fp32": (1, 64, 128, 512)}
SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# all sparsities at the block in the middle, all blocks at the sparsity in the middle
FORWARD = [(0.9, block) for block in BLOCKS] + [(s, 64) for s in SPARSITIES if s != 0.9]
# low-bit blocks: bits, sparsities and rows of x, in bfloat16
BITS, CODES, CODE_ROWS = (8, 4, "ternary"), [(s, block) for s in (0.9, 0.95) for block in (32, 64)], (1, 4, 64)
HIDDEN, INTERMEDIATE, TRAINING_ROWS = 2048, 8192, 512
# bytes that a ring of dense weights takes, more than the caches hold
RING_BYTES = 100e6


def random_blocks(shape, block: int, sparsity: float, dtype: torch.dtype):
    """values [NB, L, b, b] and col_indices [NB, L] of a row-balanced mask."""
    rows, columns = shape[0] // block, shape[1] // block
    live = max(1, round(columns * (1 - sparsity)))
    chosen = torch.rand(rows, columns).topk(live).indices.sort().values.int()
    return torch.randn(rows, live, block, block).mul_(0.02).to(dtype), chosen


def bsr(values, columns, shape):
    """torch's tensor in compressed block rows, of the same blocks."""
    rows, live = columns.shape
    pointers = torch.arange(rows + 1, dtype=torch.int32) * live
    with warnings.catch_warnings():
        # "beta state"
        warnings.simplefilter("ignore")
        return torch.sparse_bsr_tensor(pointers, columns.flatten(), values.flatten(0, 1), shape)


def forward_candidates(shape, block: int, sparsity: float, dtype: torch.dtype) -> tuple[dict, float]:
    """name -> function(x, i), and dense weights per live one."""
    count = max(2, round(RING_BYTES / (shape[0] * shape[1] * dtype.itemsize)))
    dense = [torch.randn(shape).mul_(0.02).to(dtype) for _ in range(count)]
    sparse = [random_blocks(shape, block, sparsity, dtype) for _ in range(count)]
    functions = {
        "dense": lambda x, i: F.linear(x, dense[i % count]),
        "blocks": lambda x, i: block_linear(x, *sparse[i % count], None, shape[1]),
    }

    def by_torch(x, i):
        with use_kernel("reference"):
            return block_linear(x, *sparse[i % count], None, shape[1])

    functions["torch"] = by_torch
    if dtype == torch.float32:
        tensors = [bsr(*pair, shape) for pair in sparse]
        functions["bsr"] = lambda x, i: F.linear(x, tensors[i % count])
    return functions, shape[0] * shape[1] / sparse[0][0].numel()


def code_candidates(shape, block: int, sparsity: float, dtype: torch.dtype) -> tuple[dict, float]:
    """As `forward_candidates`, with the same blocks in low bits."""
    count = max(2, round(RING_BYTES / (shape[0] * shape[1] * dtype.itemsize)))
    dense = [torch.randn(shape).mul_(0.02).to(dtype) for _ in range(count)]
    # so many that those of two bits don't stay in the caches either
    sparse = [random_blocks(shape, block, sparsity, dtype) for _ in range(8 * count)]
    functions = {
        "dense": lambda x, i: F.linear(x, dense[i % len(dense)]),
        "blocks": lambda x, i: block_linear(x, *sparse[i % len(sparse)], None, shape[1]),
    }
    for bits in BITS:
        codes = [(*quantize_blocks(values, bits), columns) for values, columns in sparse]
        for activations in ("float", "int8"):

            def product(x, i, codes=codes, bits=bits, int8=activations == "int8"):
                return block_code_linear(x, *codes[i % len(codes)], None, shape[1], bits, block, int8_activations=int8)

            functions[f"{bits} {activations}"] = product
    return functions, shape[0] * shape[1] / sparse[0][0].numel()


def check(functions: dict, block: int, shape, dtype: torch.dtype) -> None:
    """Both products of blocks are right, before anyone asks how fast they are."""
    values, columns = random_blocks(shape, block, 0.9, dtype)
    x = torch.randn(5, shape[1]).to(dtype)
    expected = F.linear(x.float(), scatter(values, columns, None, shape, tuple(values.shape[-2:])).float())
    for name in (None, "reference"):
        with use_kernel(name) if name else nullcontext():
            y = block_linear(x, values, columns, None, shape[1])
        torch.testing.assert_close(y.float(), expected, atol=0.1, rtol=0.02)


def mlp(gate, up, down):
    """What a Llama's MLP computes with three products."""
    return lambda x: down(F.silu(gate(x)) * up(x))


def training_candidates(block: int, sparsity: float, dtype: torch.dtype) -> dict:
    """name -> function(x, i): forward, and the gradients of x and of three weights."""
    shapes = [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    dense = [torch.randn(shape).mul_(0.02).to(dtype).requires_grad_() for shape in shapes]
    sparse = [random_blocks(shape, block, sparsity, dtype) for shape in shapes]
    values = [v.requires_grad_() for v, _ in sparse]
    layers = {
        "dense": (mlp(*[lambda x, w=w: F.linear(x, w) for w in dense]), dense),
        "blocks": (
            mlp(
                *[
                    lambda x, v=v, c=c, n=s[1]: block_linear(x, v, c, None, n)
                    for (v, c), s in zip(sparse, shapes, strict=True)
                ]
            ),
            values,
        ),
    }

    def step(x, name):
        layer, weights = layers[name]
        x = x.requires_grad_()
        torch.autograd.grad(layer(x).sum(), (x, *weights))

    def by_torch(x, i):
        with use_kernel("reference"):
            step(x, "blocks")

    return {**{name: lambda x, i, name=name: step(x, name) for name in layers}, "torch": by_torch}


def measure(record: Record, key: str, functions: dict, x: torch.Tensor, facts: dict, show: bool) -> None:
    with watch() as spent:
        stream = stream_gb_per_s()
        seconds = medians(functions, x)
    figures = {n: {"ms": round(s * 1e3, 3), "ratio": round(seconds["dense"] / s, 2)} for n, s in seconds.items()}
    for found in figures.values():
        found["of_limit"] = round(found["ratio"] / facts["limit"], 2)
    line = " ".join(f"{name}: {found['ratio']}" for name, found in figures.items())
    if not is_quiet(spent.others, stream):
        print(f"{key}: thrown away, the machine is busy ({spent.others:.1f} cores, {stream:.1f} GB/s)"
              f"{' ' + line if show else ''}", flush=True)  # fmt: skip
        return
    record.add(
        key, {"stream": round(stream, 1), "others": round(spent.others or 0.0, 2), **facts, "products": figures}
    )
    print(key, line, f"limit: {facts['limit']}", flush=True)


def kernel_of(block: int, shape, rows: int, dtype: torch.dtype) -> str:
    kernel = choose_blocks(BlockProblem(block, block, shape[0] // block, shape[1], rows, dtype, "cpu"))
    return "torch" if kernel is None else kernel.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--restart", action="store_true", help="forget earlier results")
    parser.add_argument("--show", action="store_true", help="print what a busy machine measures; it isn't recorded")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    protocol = {"shapes": SHAPES, "forward": FORWARD, "rows": ROWS, "codes": [BITS, CODES, CODE_ROWS],
                "training": [HIDDEN, INTERMEDIATE, TRAINING_ROWS, BLOCKS], "balance": "row", "threads": 1}  # fmt: skip
    record = Record("blocks", protocol, arguments.restart)
    for dtype_name, dtype in DTYPES.items():
        for shape in SHAPES:
            for sparsity, block in FORWARD:
                keys = {m: f"forward {dtype_name} {shape[0]}x{shape[1]} {sparsity:.0%} b{block} M={m}"
                        for m in ROWS[dtype_name]}  # fmt: skip
                if all(key in record.rows for key in keys.values()):
                    continue
                functions, limit = forward_candidates(shape, block, sparsity, dtype)
                check(functions, block, shape, dtype)
                for rows, key in keys.items():
                    if key not in record.rows:
                        facts = {"limit": round(limit, 2), "kernel": kernel_of(block, shape, rows, dtype)}
                        with torch.no_grad():
                            measure(
                                record, key, functions, torch.randn(rows, shape[1]).to(dtype), facts, arguments.show
                            )
        for block, sparsity in [(block, sparsity) for block in BLOCKS for sparsity in SPARSITIES]:
            key = f"training {dtype_name} {HIDDEN}x{INTERMEDIATE} {sparsity:.0%} b{block} M={TRAINING_ROWS}"
            if key not in record.rows:
                functions = training_candidates(block, sparsity, dtype)
                live = max(1, round(HIDDEN / block * (1 - sparsity))) / (HIDDEN / block)
                facts = {"limit": round(1 / live, 2), "kernel": kernel_of(block, SHAPES[1], TRAINING_ROWS, dtype)}
                measure(record, key, functions, torch.randn(TRAINING_ROWS, HIDDEN).to(dtype), facts, arguments.show)
    for shape, (sparsity, block) in [(shape, case) for shape in SHAPES for case in CODES]:
        keys = {m: f"codes bf16 {shape[0]}x{shape[1]} {sparsity:.0%} b{block} M={m}" for m in CODE_ROWS}
        if all(key in record.rows for key in keys.values()):
            continue
        functions, limit = code_candidates(shape, block, sparsity, torch.bfloat16)
        for rows, key in keys.items():
            if key not in record.rows:
                facts = {"limit": round(limit, 2), "kernel": kernel_of(block, shape, rows, torch.bfloat16)}
                with torch.no_grad():
                    measure(record, key, functions, torch.randn(rows, shape[1]).bfloat16(), facts, arguments.show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
