"""Timing products on a CUDA device: layers in a ring larger than the cache, a pass over them captured in a graph.

Launching from Python takes longer than a product with one row; replaying a graph does not launch. A ring of layers
that together exceed the device's cache several times makes each product read its weights from memory, as in a model.
The time of a replay, by the device's own events, over the number of layers is the time of a product, with all that
belongs to it: rounding of activations, sums over parts.
"""

import statistics
from collections.abc import Callable

import torch

from benchmarks.linear import packed_ring


# of 2-bit weights, the smallest there are; the cache of an H200 holds 50 MB
LEAST_RING_BYTES = 200e6
MOST_LAYERS = 64
REPLAYS = 20


def ring_length(shape: tuple[int, int]) -> int:
    """Layers in a ring, so that even at 2 bits a weight they exceed LEAST_RING_BYTES, within MOST_LAYERS."""
    return max(2, min(MOST_LAYERS, round(LEAST_RING_BYTES / (shape[0] * shape[1] / 4))))


def device_ring(bits, group, shape: tuple[int, int], device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(packed weight, scale) of `ring_length` layers."""
    ring = packed_ring(bits, group, shape, ring_length(shape))
    return [(weight.to(device), scale.to(device)) for weight, scale in ring]


def captured(function: Callable, x: torch.Tensor, count: int) -> torch.cuda.CUDAGraph:
    """A graph of one pass over a ring: function(x, 0) to function(x, count - 1)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # what compiles or allocates at a first call does so before
    with torch.cuda.stream(stream):
        for _ in range(2):
            for i in range(count):
                function(x, i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            function(x, i)
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of one replay, by events of the device."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def interleaved(graphs: dict[str, torch.cuda.CUDAGraph], count: int) -> dict[str, list[float]]:
    """Seconds a product of every replay, all graphs in turn; a first round warms the clock up."""
    for graph in graphs.values():
        replay_seconds(graph)
    spent = {name: [] for name in graphs}
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            spent[name].append(replay_seconds(graph) / count)
    return spent


def drift(seconds: list[float]) -> float:
    """How far the medians of the first and the last half lie apart, as a part of the smaller."""
    half = len(seconds) // 2
    first, last = statistics.median(seconds[:half]), statistics.median(seconds[half:])
    return abs(first - last) / min(first, last)
