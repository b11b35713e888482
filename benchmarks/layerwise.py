"""What one call for the norms of all layers brings to LARS and LAMB: `python -m benchmarks.layerwise`.

    ratio = median seconds of a loop over tensors / median seconds of `lb.LARS` (or `lb.LAMB`), which steps lists

The loop calls the functions of `functional/trust.py` tensor by tensor, which is the same arithmetic (a test compares
them). Shapes: TENSORS weights of one size, small ones, where the calls are what costs, and larger ones, where the
memory is; and those of SmolLM2-135M's attention and MLPs.

Writes benchmarks/results/layerwise.json, from a machine without other work.
"""

import argparse
import sys

import torch

import hf_lowbit as lb
from benchmarks.linear import medians
from benchmarks.record import Record, is_quiet, watch
from hf_lowbit.functional.trust import lamb, lars


TENSORS = 161
# name -> shapes of the weights
SIZES = {
    "161 of 64 x 64": [(64, 64)] * TENSORS,
    "161 of 256 x 256": [(256, 256)] * TENSORS,
    "SmolLM2-135M, 210 layers": [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576),
                                 (576, 1536)] * 30,
}  # fmt: skip
OPTIMIZERS = {"lars": lb.LARS, "lamb": lb.LAMB}
RATE, DECAY = 1e-3, 1e-2


def weights_of(shapes) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    found = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for weight in found:
        weight.grad = torch.randn_like(weight)
    return found


class Loop:
    """The same steps, tensor by tensor."""

    def __init__(self, kind: str, weights: list[torch.nn.Parameter]):
        self.kind, self.weights, self.count = kind, weights, 0
        self.moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        for index, weight in enumerate(self.weights):
            first, second = self.moments[index]
            if self.kind == "lars":
                moved, first = lars(weight.grad, weight, first, RATE, 0.9, 0.001, 0.0, DECAY)
            else:
                moved, first, second = lamb(
                    weight.grad, weight, first, second, self.count, RATE, (0.9, 0.999), 1e-6, DECAY
                )
            weight -= moved
            self.moments[index] = first, second


def measure(kind: str, shapes) -> dict:
    """Milliseconds of a step, both ways, in one interleaved loop."""
    optimizer = OPTIMIZERS[kind](weights_of(shapes), lr=RATE, weight_decay=DECAY)
    loop = Loop(kind, weights_of(shapes))
    seconds = medians({"lists": lambda x, i: optimizer.step(), "loop": lambda x, i: loop.step()}, None)
    figures = {f"{name}_ms": round(1e3 * value, 3) for name, value in seconds.items()}
    return {**figures, "ratio": round(seconds["loop"] / seconds["lists"], 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--restart", action="store_true", help="forget earlier results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = Record("layerwise", {"sizes": list(SIZES), "threads": 1}, arguments.restart)
    for kind in OPTIMIZERS:
        for name, shapes in SIZES.items():
            key = f"{kind}/{name}"
            if key in record.rows:
                continue
            with watch() as spent:
                figures = measure(kind, shapes)
            if is_quiet(spent.others):
                record.add(key, {**figures, "others": spent.others})
                print(key, figures, flush=True)
            else:
                print(f"{key}: thrown away, others used {spent.others:.1f} cores meanwhile.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
