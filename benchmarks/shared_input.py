"""What layers gain that read the same x and prepare it once: q, k and v, gate and up.

    python -m benchmarks.shared_input [--turns N] [--restart]

    parts     of one layer's call, microseconds: `call` of the module, `library` the C function alone,
              `preparation` the same with one row of W: what is left when there is next to nothing to multiply
    groups    microseconds of all layers of a group, `apart` and `together`, and the median of apart / together
              within a turn

One thread. A ring of groups stands for the layers of a model; every group gets an x of its own, as in a model. The two
take turns. Only runs of a quiet machine are kept in benchmarks/results/shared_input.json; others are printed and
thrown away.
"""

import argparse
import statistics
import time
from contextlib import nullcontext

import torch
from torch import Tensor, nn

import hf_lowbit as lb
from benchmarks.record import Record, is_quiet, stream_gb_per_s, watch
from hf_lowbit.functional.linear import problem_of
from hf_lowbit.kernels import separate_products
from hf_lowbit.kernels.cpu import TIERS, library
from hf_lowbit.kernels.cpu.record import record_of
from hf_lowbit.nn.linear import LowBitLinear
from hf_lowbit.nn.packed import PackedWeight, install
from hf_lowbit.nn.sharing import FEWEST_ROWS


# in_features, out_features of each layer, groups in the ring: SmolLM2-135M, and a Llama of a billion parameters
GROUPS = {
    "smollm2 qkv": (576, (576, 192, 192), 30),
    "smollm2 gate-up": (576, (1536, 1536), 30),
    "llama-1b qkv": (2048, (2048, 512, 512), 16),
    "llama-1b gate-up": (2048, (8192, 8192), 4),
}
SCHEMES = {
    "ternary": lb.Scheme("ternary", "tensor"),
    "int4 int8": lb.Scheme(4, 64, activations="int8"),
    "int4 float": lb.Scheme(4, 64),
    "int8 int8": lb.Scheme(8, None, activations="int8"),
}
ROWS = (1, 8, 16, 64, 128, 512)
DTYPE = torch.bfloat16


def low_layer(in_features: int, out_features: int, scheme: lb.Scheme) -> LowBitLinear:
    """Random codes: speed does not depend on them."""
    with torch.device("meta"):
        layer = nn.Linear(in_features, out_features, bias=False)
    layer.__class__ = LowBitLinear
    packed = PackedWeight(scheme, (out_features, in_features))
    stored = {suffix: torch.empty(shape, dtype=dtype) for suffix, (shape, dtype) in packed.tensors().items()}
    for tensor in stored.values():
        tensor.fill_(0.01) if tensor.is_floating_point() else tensor.random_(-128, 128)
    if scheme.bits == "ternary":
        # the field 3 is no code
        stored[""] &= 0x55
    install(layer, "weight", packed, stored)
    return layer.eval()


def ring(group: str, scheme: lb.Scheme) -> list[list[LowBitLinear]]:
    in_features, widths, count = GROUPS[group]
    return [[low_layer(in_features, width, scheme) for width in widths] for _ in range(count)]


def seconds_of(groups: list[list[LowBitLinear]], inputs: list[Tensor], repeats: int) -> float:
    """Of one group; each x serves one group at a time."""
    begin = time.perf_counter()
    for _ in range(repeats):
        for layers, x in zip(groups, inputs, strict=True):
            for layer in layers:
                layer(x)
    return (time.perf_counter() - begin) / (repeats * len(groups))


def measure_group(group: str, scheme: lb.Scheme, rows: int, turns: int) -> dict[str, float]:
    groups = ring(group, scheme)
    inputs = [torch.randn(1, rows, GROUPS[group][0]).to(DTYPE) for _ in groups]
    ways = {"apart": separate_products, "together": nullcontext}
    results = []
    with torch.no_grad():
        repeats = 1
        for way in (*ways.values(), *ways.values()):
            # the first calls choose kernels and learn who reads what
            with way():
                seconds = [seconds_of(groups, inputs, 1) for _ in range(2)]
                repeats = max(1, int(0.02 / (seconds[-1] * len(groups))))
        for _ in range(turns):
            turn = {}
            for name, way in ways.items():
                with way():
                    turn[name] = seconds_of(groups, inputs, repeats)
            results.append(turn)
    figures = {f"{name} us": round(1e6 * statistics.median(r[name] for r in results), 1) for name in ways}
    return {**figures, "ratio": round(statistics.median(r["apart"] / r["together"] for r in results), 3)}


def measure_parts(scheme: lb.Scheme, rows: int, turns: int, size: int = 576) -> dict[str, float]:
    """Microseconds of the parts of one layer's call, size x size, its weight in the cache."""
    layer, small = (low_layer(size, width, scheme) for width in (size, 1))
    x, y = (torch.randn(rows, size).to(DTYPE) for _ in range(2))
    tier, linear = next(tier for name, (tier, _, needed) in TIERS.items()
                        if library.load().features & needed == needed), library.load().linear  # fmt: skip
    bits, in_features, block, int8 = layer.lowbit["weight"].product

    def library_call(module):
        weight, scale = module.weight.data[0], module.weight_scale
        problem = problem_of(x, weight, scale, None, bits, in_features, block or 0, int8)
        record = record_of(bits, block or 0, problem.per_tensor, scale.dtype, DTYPE, weight.shape[0], size, int8)
        arguments = (library.address_of(record), tier, 1, rows, x.data_ptr(), size, weight.data_ptr(),
                     scale.data_ptr(), None, None, 0, y.data_ptr())  # fmt: skip
        # the record lives as long as the function
        return lambda record=record: linear(*arguments)

    parts = {"call": lambda: layer(x), "library": library_call(layer), "preparation": library_call(small)}
    found: dict[str, list[float]] = {name: [] for name in parts}
    with torch.no_grad(), separate_products():
        for _ in range(turns):
            for name, function in parts.items():
                begin = time.perf_counter()
                for _ in range(50):
                    function()
                found[name].append((time.perf_counter() - begin) / 50)
    return {f"{name} us": round(1e6 * statistics.median(times), 1) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--restart", action="store_true", help="forget the rows of earlier runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    protocol = {"groups": GROUPS, "rows": ROWS, "fewest_rows": FEWEST_ROWS, "dtype": str(DTYPE),
                "schemes": {name: scheme.to_dict() for name, scheme in SCHEMES.items()},
                "turns": options.turns}  # fmt: skip
    record = Record("shared_input", protocol, options.restart)
    cases = {f"parts {scheme} M={rows}": lambda s=scheme, m=rows: measure_parts(SCHEMES[s], m, options.turns)
             for scheme in SCHEMES for rows in ROWS}  # fmt: skip
    cases |= {f"{group} {scheme} M={rows}": lambda g=group, s=scheme, m=rows: measure_group(
        g, SCHEMES[s], m, options.turns) for group in GROUPS for scheme in SCHEMES for rows in ROWS}  # fmt: skip
    cases = {key: case for key, case in cases.items() if key not in record.rows}
    print(f"{len(cases)} rows to measure, about {len(cases) * options.turns * 0.07 / 60:.0f} minutes.")
    for key, case in cases.items():
        with watch() as spent:
            figures = case()
        quiet = is_quiet(spent.others, stream_gb_per_s())
        print(f"{key}: {figures}{'' if quiet else ' (busy machine: not kept)'}", flush=True)
        if quiet:
            record.add(key, figures)


if __name__ == "__main__":
    main()
