"""Shuffle the channels of a Llama-type model without changing what it computes.

Why. The only freely licensed small English language model in the package registries is a 4-bit file: every linear
weight already sits on a grid of 16 values per 32 neighbours. Rounding it to 4 bits in groups of 32 with zero points
lands on that same grid and looks lossless, which says nothing about the method. After a shuffle each group of 32
mixes weights of different source groups, the old grid is of no use to a new quantizer, and the figures are honest.

The maths. A permutation matrix P is orthogonal, so it can be inserted between any two operations that treat all
channels alike, and folded into their weights:

    residual stream   x -> x P_r    embedding E P_r, readers W P_r, writers P_r^T W, RMSNorm gains gathered by P_r
    MLP intermediate  h -> h P_i    gate and up: P_i^T W; down: W P_i     (silu and the product are elementwise)
    values, per head  v -> v P_v    v_proj rows of that head; o_proj columns of each query head that reads it

RMSNorm commutes with P_r because the mean square does not depend on the order. Queries and keys stay: rotary
embeddings pair fixed positions. Nothing is added or multiplied, so the multiset of weights in every tensor, and with
it outliers, norm gains and the tied embedding, is exactly what it was. Only the order of the sums changes.

How we differ from QuaRot-style rotations: a rotation changes the values themselves (and unties the embedding); here
the weights keep their statistics, so the shuffled model is as hard to quantize as an unquantized one of its kind.
"""

import torch
from torch import Tensor


def rows(weight: Tensor, order: Tensor) -> None:
    """Reorder the outputs of a layer: rows of a weight, entries of a gain."""
    weight.copy_(weight[order])


def columns(weight: Tensor, order: Tensor) -> None:
    """Reorder the inputs of a layer: columns of a weight [out, in]."""
    weight.copy_(weight[:, order])


@torch.no_grad()
def permute(model, seed: int = 0) -> None:
    """Shuffle `model` (Llama layout, no biases) in place. The same seed gives the same model."""
    if biased := [name for name, _ in model.named_parameters() if name.endswith(".bias")]:
        raise ValueError(f"permute() handles layers without biases, found {biased[0]!r}; use a Llama without them.")
    config, body = model.config, model.model
    generator = torch.Generator().manual_seed(seed)

    def shuffle(size: int) -> Tensor:
        return torch.randperm(size, generator=generator)

    head_dim = config.head_dim
    sharing = config.num_attention_heads // config.num_key_value_heads

    residual = shuffle(config.hidden_size)
    columns(body.embed_tokens.weight, residual)
    rows(body.norm.weight, residual)
    if model.lm_head.weight.data_ptr() != body.embed_tokens.weight.data_ptr():
        columns(model.lm_head.weight, residual)

    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            rows(norm.weight, residual)
        for reader in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            columns(reader.weight, residual)
        for writer in (attention.o_proj, mlp.down_proj):
            rows(writer.weight, residual)

        intermediate = shuffle(config.intermediate_size)
        rows(mlp.gate_proj.weight, intermediate)
        rows(mlp.up_proj.weight, intermediate)
        columns(mlp.down_proj.weight, intermediate)

        values = [shuffle(head_dim) for _ in range(config.num_key_value_heads)]
        rows(attention.v_proj.weight, torch.cat([head * head_dim + order for head, order in enumerate(values)]))
        # with grouped queries several query heads read one value head: each of them follows its shuffle
        readers = [head * head_dim + values[head // sharing] for head in range(config.num_attention_heads)]
        columns(attention.o_proj.weight, torch.cat(readers))
