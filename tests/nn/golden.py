"""Writes the golden checkpoint: `python -m tests.nn.golden`. Only for a new format version, in a new folder.

A Mixtral of one layer in which every bit width, scope and kind of weight occurs, with and without zero points. Codes,
scales and zero points follow formulas and not a rounding method: the files stay as they are when rounding gets better.
"""

from pathlib import Path

import torch
import transformers as hf

import hf_lowbit as lb
from hf_lowbit.functional.grid import grid_of
from hf_lowbit.functional.packing import pack
from hf_lowbit.nn.packed import LowBitModule


FOLDER = Path(__file__).parents[1] / "data" / "golden" / "v1"
SIZES = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 11, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 16,
         "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}  # fmt: skip
ATTENTION, EXPERTS = "model.layers.0.self_attn", "model.layers.0.mlp.experts"
SCHEMES = {
    f"{ATTENTION}.q_proj": lb.Scheme("ternary", "tensor"),
    f"{ATTENTION}.k_proj": lb.Scheme(2, 5),
    f"{ATTENTION}.v_proj": lb.Scheme(3, None),
    f"{ATTENTION}.o_proj": lb.Scheme(4, 5, activations="int8"),
    f"{EXPERTS}.gate_up_proj": lb.Scheme(8, 4, symmetric=False),
    f"{EXPERTS}.down_proj": lb.Scheme(3, None, symmetric=True),
    "model.embed_tokens": lb.Scheme(8, None),
}


def count(shape: tuple[int, ...]) -> torch.Tensor:
    """0, 1, 2, ... in `shape`."""
    return torch.arange(torch.Size(shape).numel()).view(shape)


def codes(bits, shape) -> torch.Tensor:
    """Codes all over the grid (the upper bits of a multiplication), no two rows alike."""
    grid = grid_of(bits)
    return ((count(shape) * 40503 >> 7) % (grid.levels + 1) + grid.qmin).to(torch.int8)


def scales(shape, dtype) -> torch.Tensor:
    """1/8, 2/8, ... 7/8: exact in every dtype."""
    return ((count(shape) % 7 + 1) / 8).to(dtype)


def zero_points(bits, shape) -> torch.Tensor:
    grid = grid_of(bits)
    return (count(shape) * 3 % (grid.levels + 1) + grid.qmin).to(torch.int8)


def build() -> hf.MixtralForCausalLM:
    """The low-bit model."""
    torch.manual_seed(0)
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((count(tuple(parameter.shape)) * 3 % 16 - 8) / 8)
    lb.quantize(model, lb.LowBitConfig(modules=SCHEMES))
    with torch.no_grad():
        for module in model.modules():
            for name, packed in module.lowbit.items() if isinstance(module, LowBitModule) else ():
                bits = packed.scheme.bits
                stored, scale = module._parameters[name], module._parameters[f"{name}_scale"]
                shape = (*packed.experts, 1, packed.out_features, packed.in_features)
                stored.copy_(pack(codes(bits, shape), grid_of(bits)))
                scale.copy_(scales(tuple(scale.shape), scale.dtype))
                zero_point = module._parameters[f"{name}_zero_point"]
                if zero_point is not None:
                    zero_point.copy_(zero_points(bits, tuple(zero_point.shape)))
    return model


if __name__ == "__main__":
    if FOLDER.exists():
        raise SystemExit(f"{FOLDER} exists: readers of it are in the world, and it must not change.")
    build().save_pretrained(FOLDER)
    (FOLDER / "generation_config.json").unlink(missing_ok=True)
    print(FOLDER)
