"""How long a direct update takes: `python -m benchmarks.update`, against torch's fused AdamW.

    ratio = median seconds of the direct update / median seconds of torch.optim.AdamW(fused=True),   interleaved

Two kinds of rows. "update": weights of one size, all with gradients; only the optimizers' steps are timed, with all
that they do (the check for finite gradients included). For each number of stored bits, state bits and dtype of the
gradients. "step": a training step of SmolLM2-135M, forward, backward, clipping and update, of 4 x 128 tokens under
bfloat16 autocast. Low-bit weights move directly, and the float ones by torch's fused AdamW, as under `DQTCallback`.

A run on a busy machine is not recorded: see `record.is_quiet`. Writes benchmarks/results/update.json.
"""

import argparse
import random
import statistics
import time

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import hf_lowbit as lb
from benchmarks.record import Record, is_quiet, stream_gb_per_s, watch
from hf_lowbit.training.updater import direct_parameters
from scripts.fetch_assets import locate


# weights of 1536 x 576, as the MLPs of SmolLM2, more than the caches hold
SHAPE, COUNT = (1536, 576), 24
BITS, STATE_BITS = ("ternary", 2, 3, 4, 8), (32, 16, 8, 4)
GRADS = {"fp32": torch.float32, "bf16": torch.bfloat16}
RULES = ("adamw", "lion", "sgd")
REPEATS = 15
BATCH, CONTEXT, STEPS = 4, 128, 7
# what of the model is trained directly, in the step
WAYS = {
    "8 bits, 8-bit states": ({"bits": 8}, 8),
    "8 bits, ternary forward, 8-bit states": ({"bits": 8, "forward_bits": "ternary"}, 8),
    "ternary, 8-bit states": ({"bits": "ternary"}, 8),
}


def medians(calls: dict, repeats: int) -> dict[str, float]:
    """Median seconds of each call; all of them in random order, `repeats` times."""
    seconds = {name: [] for name in calls}
    for index in range(repeats + 1):
        for name in random.sample(list(calls), len(calls)):
            begin = time.perf_counter()
            calls[name]()
            if index:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found) for name, found in seconds.items()}


def float_update() -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.randn(SHAPE) * 0.02) for _ in range(COUNT)]
    for parameter in parameters:
        parameter.grad = torch.randn(SHAPE) * 1e-3
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def direct_update(bits, state_bits: int, dtype: torch.dtype, rule: str) -> lb.DQTOptimizer:
    layers = nn.Sequential(*[nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=dtype) for _ in range(COUNT)])
    model = lb.quantize(layers, lb.DQTConfig(bits=bits, grad_dtype=str(dtype).removeprefix("torch.")))
    for layer in model:
        layer.weight.grad = (torch.randn(SHAPE) * 1e-3).to(dtype)
    return lb.DQTOptimizer(model, lr=1e-4, state_bits=state_bits, optimizer=rule)


def measure_updates(bits, dtype_name: str) -> dict:
    """Nanoseconds a parameter, and ratios to the fused AdamW, for every state and rule."""
    reference = float_update()
    count = COUNT * SHAPE[0] * SHAPE[1]
    optimizers = {
        f"{rule}, {states}-bit states": direct_update(bits, states, GRADS[dtype_name], rule)
        for rule in RULES
        for states in STATE_BITS
    }
    seconds = medians({"fused AdamW": reference.step, **{n: o.step for n, o in optimizers.items()}}, REPEATS)
    base = seconds["fused AdamW"]
    return {n: {"ns": round(s / count * 1e9, 3), "ratio": round(s / base, 2)} for n, s in seconds.items()}


class Training:
    """A model and its optimizers; a call is one step."""

    def __init__(self, fields: dict | None, state_bits: int | None, ids: torch.Tensor):
        config = {} if fields is None else {"quantization_config": lb.DQTConfig(**fields)}
        self.model = AutoModelForCausalLM.from_pretrained(locate("smollm2"), dtype=torch.float32, **config).train()
        self.ids = ids
        direct = direct_parameters(self.model)
        own = {id(parameter) for _, parameter in direct}
        floats = [p for p in self.model.parameters() if p.requires_grad and id(p) not in own]
        self.optimizers = [torch.optim.AdamW(floats, lr=1e-5, fused=True)]
        if direct:
            self.optimizers.append(lb.DQTOptimizer(direct, lr=1e-5, state_bits=state_bits))

    def __call__(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)


def measure_step(way: str) -> dict:
    """Seconds of a step, and the ratio to the float model's."""
    ids = torch.randint(1000, 40000, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(0))
    calls = {"fp32 AdamW": Training(None, None, ids), way: Training(*WAYS[way], ids)}
    seconds = medians(calls, STEPS)
    base = seconds["fp32 AdamW"]
    return {name: {"seconds": round(s, 4), "ratio": round(s / base, 3)} for name, s in seconds.items()}


def main(arguments) -> None:
    random.seed(0)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    protocol = {
        "update": {"shape": SHAPE, "weights": COUNT, "repeats": REPEATS, "baseline": "torch.optim.AdamW(fused=True)"},
        "step": {"model": "smollm2", "batch": BATCH, "context": CONTEXT, "steps": STEPS,
                 "dtype": "float32 under bfloat16 autocast", "ways": {name: str(way) for name, way in WAYS.items()}},
        "threads": arguments.threads,
    }  # fmt: skip
    record = Record("update", protocol, arguments.restart)
    work = {f"update/{bits}/{grad}": (measure_updates, bits, grad) for grad in GRADS for bits in BITS}
    if locate("smollm2") is None:
        print("SmolLM2 is not on this machine (`python scripts/fetch_assets.py`): its steps are left out.")
    else:
        work |= {f"step/{way}": (measure_step, way) for way in WAYS}
    print(f"{len(work)} rows, of which {len(record.rows)} are done; each takes 10 seconds to a minute.")
    for key, (measure, *given) in work.items():
        if key in record.rows:
            continue
        with watch() as spent:
            stream = stream_gb_per_s()
            figures = measure(*given)
        if not is_quiet(spent.others, stream):
            print(f"{key}: thrown away, the machine is busy ({spent.others:.1f} cores, {stream:.1f} GB/s)", flush=True)
            if not arguments.show:
                continue
        else:
            quiet = {"stream": round(stream, 1), "others": round(spent.others or 0.0, 2)}
            record.add(key, {**quiet, "figures": figures})
        print(key, " ".join(f"{name}: {found['ratio']}" for name, found in figures.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print what a busy machine measures; it isn't recorded")
    main(parser.parse_args())
