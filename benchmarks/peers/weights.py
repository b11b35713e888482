"""Rounding by other libraries beside ours, on one model and text: `python -m benchmarks.peers.weights`.

    perplexity   of SmolLM2-135M (permuted) with every linear layer but the output layer rounded by the library and
                 written back as dense numbers, on the text of benchmarks/compress.py, whose rows it stands beside
    average      bits a weight, scales and zero points included

HQQ rounds in groups of 64 along the input, quanto chooses its groups itself: 96 for these shapes. Scales and zero
points stay the floats that the libraries make, and are counted as 16 bits each. Each needs its package alone (`hqq`
with `termcolor`, `optimum-quanto` with `ninja`), by `pip install --no-deps`; with `--path` from folders. What is not
there is named and left out.

What is not here, and why: onecomp 1.4.0 needs Python 3.12, llm-compressor 0.14 needs transformers 5.17 or older, and
the source distribution of gptqmodel 7.7 was not built. No row of theirs is measured under this protocol.

Writes benchmarks/results/peers_weights.json.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks import perplexity
from benchmarks.record import Record
from benchmarks.refine import measure
from scripts.fetch_assets import ASSETS, locate


GROUP = 64
# a scale and a zero point of 16 bits each; the libraries hold them as floats
OVERHEAD = 32


def hqq(layer: nn.Linear, bits: int) -> tuple[Tensor, float]:
    """The layer's weight after HQQ, float32, and its bits a weight."""
    from hqq.core.quantize import Quantizer

    settings = {"nbits": bits, "group_size": GROUP, "axis": 1, "device": "cpu", "compute_dtype": torch.float32}
    codes, meta = Quantizer.quantize(layer.weight.detach().float(), **settings)
    return Quantizer.dequantize(codes, meta), bits + OVERHEAD / GROUP


def quanto(layer: nn.Linear, bits: int) -> tuple[Tensor, float]:
    """The layer's weight after quanto, float32, and its bits a weight."""
    from optimum.quanto import freeze, qint2, qint4, quantize

    holder = nn.Sequential(copy.deepcopy(layer).float())
    quantize(holder, weights={2: qint2, 4: qint4}[bits])
    freeze(holder)
    return holder[0].weight.dequantize().detach(), bits + OVERHEAD / holder[0].weight_group_size


PEERS: dict[str, tuple[Callable, tuple[int, ...]]] = {"hqq": (hqq, (4, 3, 2)), "quanto": (quanto, (4, 2))}


def obstacle(peer: Callable, bits: int) -> str | None:
    """Why a library can't be used here, or None. A result that is farther off than plain rounding would be is none."""
    layer = nn.Linear(2 * GROUP, 8, bias=False)
    try:
        weight, _ = peer(layer, bits)
    except Exception as error:  # whatever a foreign library raises is the reason
        return f"{type(error).__name__}: {error}"
    off = float((weight - layer.weight.detach()).norm() / layer.weight.detach().norm())
    return None if off < 2.0**-bits * 3 else f"its weights are off by {off:.2f} of their norm"


def layers(model: nn.Module) -> Iterator[nn.Linear]:
    """Every linear layer but the output layer: what `lb.quantize` converts by default."""
    head = model.get_output_embeddings()
    return (m for m in model.modules() if isinstance(m, nn.Linear) and m is not head)


@torch.no_grad()
def rounded(dense: nn.Module, peer: Callable, bits: int) -> tuple[nn.Module, float]:
    """A copy of `dense` with rounded weights, and its average bits a weight."""
    model, stored, count = copy.deepcopy(dense), 0.0, 0
    for layer in layers(model):
        weight, width = peer(layer, bits)
        stored, count = stored + width * weight.numel(), count + weight.numel()
        layer.weight.copy_(weight)
    return model, stored / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true", help="throw the measured rows away")
    parser.add_argument("--path", action="append", default=[], help="a folder with a library, may be repeated")
    parser.add_argument("--minutes", type=float, default=20, help="begin no row after this time")
    arguments = parser.parse_args()
    sys.path[:0] = arguments.path
    folder = locate("smollm2")
    if folder is None:
        raise SystemExit("smollm2 is not on this machine; run `python scripts/fetch_assets.py`.")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {
        "baseline": ASSETS["smollm2"].baseline, "text": "persuasion", "windows": perplexity.COUNT,
        "length": perplexity.LENGTH, "dtype": "bfloat16", "group_size": GROUP,
    }  # fmt: skip
    record = Record("peers_weights", protocol, restart=arguments.restart, timed=False)
    deadline = time.monotonic() + 60 * arguments.minutes
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = perplexity.windows(tokenizer, perplexity.novel("persuasion"))
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    if "dense" not in record.rows:
        record.add("dense", measure(dense, text, None))
    for name, (peer, widths) in PEERS.items():
        for bits in widths:
            key = f"{bits}/{name}"
            if key in record.rows or time.monotonic() > deadline:
                continue
            reason = obstacle(peer, bits)
            if reason is not None:
                print(f"{key} is left out: {reason}", flush=True)
                continue
            model, average = rounded(dense, peer, bits)
            record.add(key, {**measure(model, text, record.rows["dense"]), "average": average})
            print(key, record.rows[key]["perplexity"], flush=True)


if __name__ == "__main__":
    main()
