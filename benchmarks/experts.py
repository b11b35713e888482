"""Fused experts: one call for all of a layer's products, against one call an expert and the dense layer.

    python -m benchmarks.experts [--threads N] [--turns N]

A layer of random weights in the shape of a known model, with random routing of T tokens: T=1 is a step of decoding.
The candidates take turns; a figure is the median over the turns, a ratio the median of the ratios within a turn. Only
runs of a quiet machine are kept in benchmarks/results/experts.json; others are printed and thrown away.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from benchmarks.record import Record, is_quiet, stream_gb_per_s, watch
from hf_lowbit.configs.scheme import Scheme
from hf_lowbit.functional.linear import linear
from hf_lowbit.nn.classes import lowbit_class
from hf_lowbit.nn.packed import PackedWeight, install


# name: experts, top k, hidden, intermediate
LAYERS = {"olmoe-7b": (64, 8, 2048, 1024), "mixtral-half-width": (8, 2, 2048, 7168)}
SCHEMES = {"int4": Scheme(4, 64), "ternary": Scheme("ternary", None)}
TOKENS = (1, 16, 128)
NAMES = ("gate_up_proj", "down_proj")


def dense_layer(experts: int, top_k: int, hidden: int, intermediate: int) -> MixtralExperts:
    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_local_experts=experts, num_experts_per_tok=top_k
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        layer = MixtralExperts(config).to(torch.bfloat16)
    layer = layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        # a thousandth of the time that normal_ would take, and as good for timing
        parameter.data.view(torch.int16).random_(0x3C00, 0x3D00)
    return layer.eval()


def low_layer(dense: MixtralExperts, scheme: Scheme):
    """Random codes in the shape of `dense`."""
    with torch.device("meta"):
        layer = MixtralExperts(dense.config)
    layer.__class__ = lowbit_class(type(layer), "experts", NAMES)
    for name in NAMES:
        packed = PackedWeight(scheme, tuple(getattr(dense, name).shape))
        stored = {suffix: torch.empty(shape, dtype=dtype) for suffix, (shape, dtype) in packed.tensors().items()}
        for tensor in stored.values():
            tensor.fill_(0.01) if tensor.is_floating_point() else tensor.random_(-128, 128)
        if scheme.bits == "ternary":
            # the field 3 is no code
            stored[""] &= 0x55
        install(layer, name, packed, stored)
    return layer.eval()


def loop(layer, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What one call an expert takes: the eager loop of transformers, with low-bit products."""
    output = torch.zeros_like(x, dtype=torch.float32)

    def project(rows, name, e):
        parameters = layer._parameters
        tensors = (parameters[name + suffix][e] for suffix in ("", "_scale"))
        return linear(rows, *tensors, None, None, *layer.lowbit[name].product)

    for e in range(layer.num_experts):
        token, slot = torch.where(index == e)
        if token.numel():
            hidden = project(layer._apply_gate(project(x[token], NAMES[0], e)), NAMES[1], e)
            output.index_add_(0, token, (hidden * weights[token, slot, None]).to(torch.float32))
    return output.to(x.dtype)


def turn(candidates: dict, arguments) -> dict[str, float]:
    seconds = {}
    for name, function in candidates.items():
        begin = time.perf_counter()
        function(*arguments)
        seconds[name] = time.perf_counter() - begin
    return seconds


def measure(candidates: dict, tokens: int, experts: int, top_k: int, hidden: int, turns: int) -> dict:
    generator, results = torch.Generator().manual_seed(0), []
    for _ in range(turns + 1):
        # other experts at each turn, as in a model: none stays in a cache
        index = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
        weights = torch.full((tokens, top_k), 1 / top_k, dtype=torch.bfloat16)
        results.append(turn(candidates, (torch.randn(tokens, hidden).bfloat16(), index, weights)))
    # the first turn also chose kernels
    results = results[1:]
    figures = {f"{name} ms": round(1e3 * statistics.median(r[name] for r in results), 3) for name in candidates}
    for other in ("loop", "dense"):
        figures[f"times {other}"] = round(statistics.median(r[other] / r["one call"] for r in results), 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--restart", action="store_true", help="forget the rows of earlier runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    protocol = {"layers": LAYERS, "tokens": TOKENS, "turns": options.turns, "threads": options.threads,
                "activations": {name: scheme.activations for name, scheme in SCHEMES.items()}}  # fmt: skip
    record = Record("experts", protocol, options.restart)
    for layer, shape in LAYERS.items():
        experts, top_k, hidden, _ = shape
        dense = dense_layer(*shape)
        for scheme_name, scheme in SCHEMES.items():
            low = low_layer(dense, scheme)
            candidates = {"one call": low, "loop": lambda *a, low=low: loop(low, *a), "dense": dense}
            for tokens in TOKENS:
                key = f"{layer} {scheme_name} T={tokens}"
                with torch.no_grad(), watch() as spent:
                    figures = measure(candidates, tokens, experts, top_k, hidden, options.turns)
                quiet = is_quiet(spent.others, stream_gb_per_s())
                print(f"{key}: {figures}{'' if quiet else ' (busy machine: not kept)'}", flush=True)
                if quiet:
                    record.add(key, figures)


if __name__ == "__main__":
    main()
