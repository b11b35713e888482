"""How fast plain `generate()` is: `python -m benchmarks.generate`, one thread, against the dense model in bfloat16.

    decode    tokens a second after the prompt, from one token handed to the streamer to the next
    prefill   128 divided by the seconds from the prompt to the first token
    ratio     median over the turns of seconds(bfloat16, eager) / seconds(candidate); the two take turns

Models: SmolLM2-135M (permuted, see scripts/permute.py), and a random Llama of 1.04 billion parameters that is built in
memory. Candidates: every scheme below, with the output layer in bfloat16 or in low bits (with it the embedding that is
tied to it), eager, and compiled: a static cache and `torch.compile(fullgraph=True)` of the decode step, which fails on
a graph break. `bf16` itself is there too, for what compiling alone brings.

Memory: loading the saved low-bit checkpoint in a process of its own, see `memory.py`. A run on a busy machine is not
recorded: see `record.is_quiet`.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import hf_lowbit as lb
from benchmarks import memory
from benchmarks.decode import comparison, timed
from benchmarks.record import Record, is_quiet, stream_gb_per_s, watch
from scripts.fetch_assets import locate


SCHEMES = {
    "bf16": None,
    "ternary": {"bits": "ternary", "group_size": "tensor"},
    "int4 int8": {"bits": 4, "group_size": 64, "activations": "int8"},
    "int4 float": {"bits": 4, "group_size": 64},
    "int8 int8": {"bits": 8, "group_size": None, "activations": "int8"},
    "int8 float": {"bits": 8, "group_size": None},
}
# the table that an output layer shares with the embedding, or the layer itself
HEADS = {"bf16 head": None, "int4 head": (4, 64), "int8 head": (8, None)}
MODES = ("eager", "compiled")
# random weights say nothing about quality, and nothing about speed depends on them
LLAMA_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
MODELS = ("smollm2", "llama-1b")
PROMPT, TURNS, STEPS = 128, 5, 8


def dense_folder(name: str, folder: Path) -> Path:
    """Where the dense bfloat16 checkpoint of a model lies; the random one is written below `folder`."""
    if name == "smollm2":
        found = locate("smollm2")
        if found is None:
            raise SystemExit("SmolLM2 is not on this machine yet; run `python scripts/fetch_assets.py smollm2`.")
        return found
    target = folder / name
    if not target.exists():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        try:
            LlamaForCausalLM(LlamaConfig(**LLAMA_1B)).save_pretrained(target)
        finally:
            torch.set_default_dtype(torch.float32)
    return target


def load(source, scheme: str, head: str):
    """The candidate, quantized while it is loaded."""
    if SCHEMES[scheme] is None:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    modules = None
    if HEADS[head] is not None:
        modules = {"embed_tokens": lb.Scheme(*HEADS[head])}
    config = lb.LowBitConfig(**SCHEMES[scheme], modules=modules)
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=config).eval()


def set_mode(model, mode: str) -> None:
    """What `generate` does from now on: a growing cache, or one of fixed size and a compiled step without breaks."""
    torch.compiler.reset()
    options = model.generation_config
    options.cache_implementation = options.compile_config = None
    if mode == "compiled":
        options.cache_implementation = "static"
        options.compile_config = CompileConfig(fullgraph=True, mode="default")
        # generate compiles by itself on accelerators only
        options.compile_config._compile_all_devices = True


def measure_speed(dense, model, prompt) -> dict[str, dict]:
    """decode and prefill: tokens a second of both, and their ratio."""
    for each in (dense, model):
        # kernels are chosen, copies made and steps compiled before anything counts
        timed(each, prompt, STEPS)
    decode, prefill = [], []
    for _ in range(TURNS):
        clocks = [timed(each, prompt, STEPS) for each in (dense, model)]
        decode.append([sorted(clock.steps())[STEPS // 2] for clock in clocks])
        prefill.append([clock.prefill() for clock in clocks])
    return {
        "decode": {key: round(value, 2) for key, value in asdict(comparison(decode)).items()},
        "prefill": {key: round(value, 2) for key, value in asdict(comparison(prefill, prompt.shape[1])).items()},
    }


def cases(name: str, record: Record):
    """scheme, head and the modes that are not recorded yet."""
    for scheme, fields in SCHEMES.items():
        for head in HEADS if fields else ("bf16 head",):
            modes = [m for m in MODES if f"{name} {scheme}, {head}, {m}" not in record.rows]
            # comparing the dense model with itself says nothing
            modes = [m for m in modes if fields or m != "eager"]
            if modes:
                yield scheme, head, modes


def sweep(name: str, record: Record, folder: Path, until: float) -> bool:
    """Measure what is missing of one model; False when time was up."""
    dense = prompt = None
    for scheme, head, modes in cases(name, record):
        if time.perf_counter() > until:
            return False
        source = dense_folder(name, folder)
        if dense is None:
            dense = load(source, "bf16", "bf16 head")
            prompt = torch.randint(0, dense.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
        model = load(source, scheme, head)
        loaded = measure_memory(model, folder) if SCHEMES[scheme] else None
        for mode in modes:
            key = f"{name} {scheme}, {head}, {mode}"
            set_mode(model, mode)
            with watch() as spent:
                stream = stream_gb_per_s()
                speed = measure_speed(dense, model, prompt)
            if not is_quiet(spent.others, stream):
                print(f"{key}: thrown away, the machine is busy ({spent.others:.1f} cores, {stream:.1f} GB/s)")
                continue
            quiet = {"stream": round(stream, 1), "others": round(spent.others or 0.0, 2)}
            record.add(key, {**speed, "memory": loaded, **quiet})
            print(key, *(f"{k}: {v['after']} tokens/s, {v['ratio']} times bf16" for k, v in speed.items()), flush=True)
    return True


def measure_memory(model, folder: Path) -> dict[str, int]:
    """Saves the model and loads it in another process."""
    with tempfile.TemporaryDirectory(dir=folder) as saved:
        model.save_pretrained(saved)
        return memory.measure(saved)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--restart", action="store_true", help="forget earlier results")
    parser.add_argument("--model", action="append", choices=MODELS, help="only these models")
    parser.add_argument("--minutes", type=float, default=20.0, help="stop after so long; run again to continue")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {"schemes": SCHEMES, "heads": HEADS, "modes": MODES, "models": MODELS, "llama-1b": LLAMA_1B,
                "prompt": PROMPT, "turns": TURNS, "steps": STEPS, "threads": 1}  # fmt: skip
    record = Record("generate", protocol, arguments.restart)
    chosen = arguments.model or MODELS
    left = sum(len(modes) for name in chosen for _, _, modes in cases(name, record))
    print(f"{left} rows to measure, about {left * 0.7:.0f} minutes; 9 GB of memory and 3 GB of disk for the largest.")
    until = time.perf_counter() + arguments.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            if not sweep(name, record, Path(folder), until):
                print("Time is up; run this again to continue.")
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
