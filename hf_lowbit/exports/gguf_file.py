"""One GGUF file for llama.cpp, of a Llama model: packed weights as its own blocks, the rest as it is.

    our grid                    block
    ternary                     TQ2_0 where 256 divides the row and its groups, else Q4_0
    2, 3, 4 bits                Q4_0; with zero points Q4_1, m = -s * (z - qmin)
    8 bits                      Q8_0

Codes are moved, never rounded again. Scales become float16: a group's bfloat16 scale fits unless it is below 2^-14,
a float32 scale of a row or tensor loses digits; both are reported. llama.cpp rounds activations itself, in blocks, so
its products are close to ours.

llama.cpp turns pairs of neighbouring rows in attention where transformers turns halves, so the rows of q_proj and
k_proj are reordered, codes and scales alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ..functional.grid import TERNARY, expand_groups, grid_of
from . import blocks
from .source import Source, Weight
from .vocabulary import add_vocabulary, check_vocabulary


FILE = "model.gguf"
ARCHITECTURE = "LlamaForCausalLM"


def check(source: Source, activations: str | None) -> None:
    """Raise ValueError for what the format can't hold, ImportError without the gguf package."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ImportError("`format`='gguf' needs the gguf package: pip install 'hf_lowbit[export]'.") from error
    config, name = source.model.config, type(source.model).__name__
    if name != ARCHITECTURE:
        raise ValueError(
            f"`format`='gguf' is written for {ARCHITECTURE} (SmolLM2, Llama) only, and this is a {name}; export as "
            "compressed-tensors, or convert model.dequantize() with llama.cpp's own script."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    unusual = {
        "rope_parameters.rope_type": (rope.get("rope_type", "default"), "default"),
        "hidden_act": (config.hidden_act, "silu"),
        "attention_bias": (config.attention_bias, False),
        "mlp_bias": (config.mlp_bias, False),
    }
    for field, (value, expected) in unusual.items():
        if value != expected:
            raise ValueError(
                f"`format`='gguf' is written for {field}={expected!r}, and this model has {value!r}; export as "
                "compressed-tensors, or convert model.dequantize() with llama.cpp's own script."
            )
    source.refuse(_obstacles, "gguf")
    check_vocabulary(source.tokenizer, config.vocab_size)


def write(source: Source, folder: Path, max_shard_size: int | str) -> tuple[dict[str, str], dict[str, str]]:
    """Write the file; how each module is stored, and which are rounded."""
    import gguf

    config = source.model.config
    writer = gguf.GGUFWriter(folder / FILE, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    _add_config(writer, source)
    add_vocabulary(writer, source.tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)

    def name_of(tensor: str) -> str:
        found = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"`{tensor}` has no name in GGUF's Llama models; export as compressed-tensors.")
        return found

    for name, tensor in source.dense_tensors().items():
        tensor = _reordered(name, tensor, config)
        # llama.cpp wants vectors in float32; numpy has no bfloat16
        if tensor.ndim == 1 or tensor.dtype == torch.float32:
            writer.add_tensor(name_of(name), tensor.to(torch.float32).cpu().numpy())
        elif tensor.dtype == torch.bfloat16:
            raw = tensor.cpu().view(torch.uint8).numpy()
            writer.add_tensor(name_of(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name_of(name), tensor.to(torch.float16).cpu().numpy())
    stored, rounded, types = {}, {}, []
    shared: dict[int, str] = {}
    for weight in source.weights:
        # a tied output layer is left out, which says that it is tied
        place = id(weight.module._parameters[weight.parameter])
        if place in shared:
            stored[weight.name] = f"the tensor of {shared[place]}"
            continue
        shared[place] = weight.name
        kind = _block_type(weight)
        rows, exact = _encode(weight, kind, config)
        writer.add_tensor(
            name_of(f"{weight.name}.weight"), rows.cpu().numpy(), raw_dtype=gguf.GGMLQuantizationType[kind]
        )
        stored[weight.name] = kind
        types.append(kind)
        if not exact:
            rounded[weight.name] = "scales rounded to float16"
    most = max(sorted(set(types)), key=types.count)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{most}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored, rounded


def _add_config(writer, source: Source) -> None:
    config = source.model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(ARCHITECTURE)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _encode(weight: Weight, kind: str, config) -> tuple[Tensor, bool]:
    """The rows of a weight in blocks, uint8 [N, bytes], and whether they hold the very numbers."""
    codes, scale, zero_point = (
        None if t is None else _reordered(f"{weight.name}.weight", t, config)
        for t in (weight.codes(), weight.scale(), weight.zero_point())
    )
    size = blocks.BLOCK[kind]
    count = weight.packed.in_features // size
    step = None if weight.scheme.block is None else weight.scheme.block // size
    spread = [None if t is None else expand_groups(t, count, step).expand(-1, count) for t in (scale, zero_point)]
    half = spread[0].to(torch.float16)
    if not bool((torch.isfinite(half) & (half > 0)).all()):
        raise ValueError(
            f"`format`='gguf' can't hold `{weight.name}`: a scale is outside float16; export as compressed-tensors."
        )
    exact = torch.equal(half.to(torch.float32), spread[0])
    if kind == "Q4_1":
        lowest = grid_of(weight.scheme.bits).qmin
        least = spread[0] * (lowest - spread[1].to(torch.float32))
        minimum = least.to(torch.float16)
        exact &= torch.equal(minimum.to(torch.float32), least)
        return blocks.q4_1(codes - lowest, half, minimum), exact
    return {"Q4_0": blocks.q4_0, "Q8_0": blocks.q8_0, "TQ2_0": blocks.tq2_0}[kind](codes, half), exact


def _reordered(name: str, tensor: Tensor, config) -> Tensor:
    """Rows of queries and keys from halves of a head, (2, d/2), to neighbouring pairs, (d/2, 2)."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _block_type(weight: Weight) -> str:
    if weight.scheme.bits == 8:
        return "Q8_0"
    if weight.scheme.bits == TERNARY:
        fits = weight.packed.in_features % 256 == 0 and (weight.scheme.block or 256) % 256 == 0
        return "TQ2_0" if fits else "Q4_0"
    return "Q4_0" if weight.scheme.symmetric else "Q4_1"


def _obstacles(weight: Weight) -> Iterable[str]:
    scheme, inputs = weight.scheme, weight.packed.in_features
    if weight.kind not in ("linear", "embedding"):
        yield f"a {weight.kind} is neither a linear layer nor an embedding; keep it dense"
    if scheme.bits == 8 and not scheme.symmetric:
        yield "8 bits have no zero points there; quantize with `symmetric=True`"
    if inputs % 32:
        yield f"rows are blocks of 32, and 32 does not divide its {inputs} inputs; keep it dense"
    elif scheme.block is not None and scheme.block % 32:
        yield f"a block of 32 has one scale, so groups of {scheme.block} don't fit; use `group_size` 32, 64, 96 or 128"
