"""What training SmolLM2-135M holds in memory: weights, gradients, optimizer states, counted tensor by tensor.

    python -m benchmarks.training_memory              # continues where the last run stopped
    python -m benchmarks.training_memory --restart

Each way to train makes two real steps (one sentence; activations are not what is compared) in a process of its own.
Counted are the bytes of the tensors that are alive after the second backward pass, at their largest: with released
gradients that is the most that any moment of the backward pass held. Peak resident memory of the process is given
too; it includes Python, libraries, activations, and the loading of the model.

    linear      bytes a parameter of the converted linear layers: weights + gradient + states
    whole       MiB of all parameters: weights + gradients + states

Writes benchmarks/results/training_memory.json; docs/training.md quotes it.
"""

import argparse
import json
import resource
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import hf_lowbit as lb
from benchmarks.record import ROOT, Record
from benchmarks.scratch_models import bitnet
from hf_lowbit.nn.slot import CodesParameter
from scripts.fetch_assets import locate


# name -> (model dtype, fields of DQTConfig, fields of DQTOptimizer); None: a float model with torch's AdamW
WAYS = {
    "fp32 AdamW": ("float32", None, None),
    "bf16 AdamW": ("bfloat16", None, None),
    "BitNet (float master), AdamW": ("float32", "bitnet", None),
    "DQT 8 bits, 32-bit states": ("bfloat16", {"bits": 8}, {"state_bits": 32}),
    "DQT 8 bits, 8-bit states": ("bfloat16", {"bits": 8}, {"state_bits": 8}),
    "DQT 8 bits, 8-bit states, released": ("bfloat16", {"bits": 8}, {"state_bits": 8, "release_gradients": True}),
    "DQT 8 bits, 4-bit states": ("bfloat16", {"bits": 8}, {"state_bits": 4}),
    "DQT 8 bits, 4-bit states, released": ("bfloat16", {"bits": 8}, {"state_bits": 4, "release_gradients": True}),
    "DQT ternary, 8-bit states": ("bfloat16", {"bits": "ternary"}, {"state_bits": 8}),
    "DQT ternary, 4-bit states": ("bfloat16", {"bits": "ternary"}, {"state_bits": 4}),
    "DQT ternary, 8-bit states, released": (
        "bfloat16",
        {"bits": "ternary"},
        {"state_bits": 8, "release_gradients": True},
    ),
    "DQT ternary, 4-bit states, released": (
        "bfloat16",
        {"bits": "ternary"},
        {"state_bits": 4, "release_gradients": True},
    ),
    "DQT ternary, Adafactor, released": (
        "bfloat16",
        {"bits": "ternary"},
        {"optimizer": "adafactor", "release_gradients": True},
    ),
}


def size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; of a trainable weight what it holds, not what it stands for."""
    if isinstance(tensor, CodesParameter):
        return size(tensor.stored) + size(tensor.scale)
    return tensor.numel() * tensor.element_size()


def measure(way: str) -> dict:
    torch.manual_seed(0)
    dtype, fields, options = WAYS[way]
    config = {"quantization_config": lb.DQTConfig(**fields)} if isinstance(fields, dict) else {}
    model = AutoModelForCausalLM.from_pretrained(locate("smollm2"), dtype=getattr(torch, dtype), **config)
    if fields == "bitnet":
        bitnet(model)
    model.train()
    linear = {n: p for n, p in model.named_parameters() if "_proj" in n and p.ndim == 2 and "scale" not in n}
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    most = {"linear": 0, "whole": 0}

    def look(_=None):
        for name, group in (("linear", linear), ("whole", parameters)):
            held = sum(size(p.grad) for p in group.values() if p.grad is not None)
            most[name] = max(most[name], held)

    if options and options.get("release_gradients"):
        # before the optimizer's own hook, which drops the gradient
        for parameter in parameters.values():
            parameter.register_post_accumulate_grad_hook(look)
    if options is None:
        optimizer = torch.optim.AdamW(parameters.values(), lr=1e-5)
    else:
        optimizer = lb.DQTOptimizer(model, lr=1e-5, **options)
    ids = torch.arange(100, 132)[None]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        look()
        optimizer.step()
        optimizer.zero_grad()
    if options is None:
        states = {n: sum(size(t) for t in optimizer.state[p].values() if t.ndim) for n, p in parameters.items()}
    else:
        saved = optimizer.updater.state["weights"]
        states = {n: sum(size(t) for k, t in saved.get(n, {}).items() if k != "t") for n in parameters}
    count = sum(p.numel() for p in linear.values())
    weights = {n: size(p) for n, p in parameters.items()}
    in_linear = {
        "weights": sum(weights[n] for n in linear), "gradients": most["linear"],
        "states": sum(states[n] for n in linear),
    }  # fmt: skip
    whole = {"weights": sum(weights.values()), "gradients": most["whole"], "states": sum(states.values())}
    return {
        "linear_parameters": count,
        "linear_bytes_per_parameter": {k: round(v / count, 4) for k, v in in_linear.items()},
        "linear_total": round(sum(in_linear.values()) / count, 4),
        "whole_mib": {k: round(v / 2**20, 1) for k, v in whole.items()},
        "whole_total_mib": round(sum(whole.values()) / 2**20, 1),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main(arguments) -> None:
    if locate("smollm2") is None:
        raise SystemExit("SmolLM2 is not on this machine: run `python scripts/fetch_assets.py`.")
    protocol = {"model": "smollm2", "ways": {name: str(way) for name, way in WAYS.items()}, "tokens": 32}
    record = Record("training_memory", protocol, arguments.restart)
    print(f"{len(WAYS)} ways, {len(record.rows)} are done; each takes about half a minute.")
    for way in WAYS:
        if way not in record.rows:
            command = [sys.executable, "-m", "benchmarks.training_memory", "--way", way]
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            record.add(way, json.loads(result.stdout.splitlines()[-1]))
        row = record.rows[way]
        print(f"{way:38}{row['linear_total']:8.2f} bytes a linear parameter {row['whole_total_mib']:8.0f} MiB in all "
              f"{row['peak_rss_mib']:8} MiB peak resident")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--way", choices=list(WAYS), help="measure this one, in this process, and print JSON")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if arguments.way:
        print(json.dumps(measure(arguments.way)))
    else:
        main(arguments)
