"""Quantize a model that is already in memory: made from a config, trained a moment ago, or loaded by other code.

    python examples/quantize_in_memory.py

`lb.quantize` is the same engine that `from_pretrained` uses. Single modules get their own scheme by name or pattern;
the first rule that names a module decides. Here the attention keeps 8 bits and one layer's MLP stays dense.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_lowbit as lb


def main(hidden_size: int, layers: int) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 3 * hidden_size, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, vocab_size=1000)).eval()
    tokens = torch.arange(16)[None]
    with torch.inference_mode():
        dense = model(tokens).logits

    config = lb.LowBitConfig(
        bits=3,
        group_size=32,
        modules={r"re:self_attn\..*_proj": lb.Scheme(bits=8, group_size=None)},
        modules_to_not_convert=["layers.0.mlp"],
    )
    model = lb.quantize(model, config)
    with torch.inference_mode():
        lowbit = model(tokens).logits
    print(lb.report(model))
    print(f"relative change of the logits: {(lowbit - dense).norm() / dense.norm():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    main(**vars(parser.parse_args()))
