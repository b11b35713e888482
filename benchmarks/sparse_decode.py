"""What 95 % sparse MLPs bring `generate()`: `python -m benchmarks.sparse_decode`, one thread, against dense bfloat16.

A random Llama of 1.04 billion parameters (`generate.LLAMA_1B`) with random row-balanced masks: speed and size depend on
nothing else. Candidates: live blocks in bfloat16, the rest of the model as it was; live blocks in 8 bits, and the rest
too, the table that embedding and output layer share included.

    size      bytes of the dense bfloat16 weights / bytes of the candidate's, indices and scales counted
    decode    tokens a second after the prompt, as decode.py measures it; the two models take turns

Sizes are recorded at once; a decode that a busy machine measured is not (`record.is_quiet`). Wants 7 GB of memory.
"""

import argparse
import sys
from dataclasses import asdict

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import hf_lowbit as lb
from benchmarks.decode import compare
from benchmarks.generate import LLAMA_1B
from benchmarks.record import Record, is_quiet, stream_gb_per_s, watch
from hf_lowbit.configs.blast import kept_blocks
from hf_lowbit.nn.sparsify import clear_module, masked_modules


SPARSITY, BLOCK, PROMPT = 0.95, 64, 128
CANDIDATES = {
    "bf16 blocks": {},
    "8-bit blocks and rest": {
        "bits": 8,
        "rest": {"bits": 8, "group_size": None, "modules": {"embed_tokens": {"bits": 8, "group_size": None}}},
    },
}


def dense_model(sizes: dict) -> LlamaForCausalLM:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def sparse_model(sizes: dict, candidate: str) -> torch.nn.Module:
    """The same random model, with as many live blocks as training to the sparsity would leave."""
    config = lb.BlastConfig(sparsity=SPARSITY, block_size=BLOCK, **CANDIDATES[candidate])
    model = lb.quantize(dense_model(sizes), config)
    for _, module in masked_modules(model):
        rows, columns = module.layout.grid
        live = kept_blocks(module.target, columns)
        chosen = torch.rand(rows, columns).topk(live).indices
        module.use_mask(torch.zeros(rows, columns, dtype=torch.bool).scatter_(1, chosen, True))
        clear_module(module)
    return lb.freeze(model).eval()


def weight_bytes(model: torch.nn.Module) -> int:
    """Of all parameters and buffers, each tensor once."""
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def measure(record: Record, sizes: dict, turns: int, steps: int, show: bool) -> None:
    dense = dense_model(sizes)
    prompt = torch.randint(sizes["vocab_size"], (1, PROMPT), generator=torch.Generator().manual_seed(0))
    for candidate in CANDIDATES:
        keys = [f"{kind} {SPARSITY:.0%} {candidate}" for kind in ("size", "decode")]
        if all(key in record.rows for key in keys):
            continue
        model = sparse_model(sizes, candidate)
        whole, kept = weight_bytes(dense), weight_bytes(model)
        record.add(keys[0], {"dense_bytes": whole, "bytes": kept, "ratio": round(whole / kept, 3)})
        print(keys[0], f"{whole / kept:.2f} times smaller: {kept / 1e6:.0f} of {whole / 1e6:.0f} MB", flush=True)
        if not turns or keys[1] in record.rows:
            continue
        with watch() as spent:
            stream = stream_gb_per_s()
            found = {k: round(v, 2) for k, v in asdict(compare(dense, model, prompt, turns, steps)).items()}
        quiet = is_quiet(spent.others, stream)
        if quiet:
            facts = {"stream": round(stream, 1), "others": round(spent.others or 0.0, 2)}
            record.add(keys[1], {**found, **facts})
        if quiet or show:
            print(keys[1], found, flush=True)
        if not quiet:
            print(f"{keys[1]}: not recorded, the machine is busy ({spent.others:.1f} cores, {stream:.1f} GB/s)")
        del model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--restart", action="store_true", help="forget earlier results")
    parser.add_argument("--turns", type=int, default=9, help="turns the models take; 0: sizes alone")
    parser.add_argument("--steps", type=int, default=10, help="tokens a turn")
    parser.add_argument("--show", action="store_true", help="print what a busy machine measures; it isn't recorded")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {"model": LLAMA_1B, "sparsity": SPARSITY, "block": BLOCK, "candidates": CANDIDATES, "prompt": PROMPT,
                "threads": 1}  # fmt: skip
    record = Record("sparse_decode", protocol, arguments.restart)
    measure(record, LLAMA_1B, arguments.turns, arguments.steps, arguments.show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
