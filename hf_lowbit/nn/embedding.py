"""Low-bit embedding table: `nn.Embedding` whose rows are packed, and unpacked when they are looked up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..functional.embedding import embedding
from .packed import LowBitModule


class LowBitEmbedding(LowBitModule, nn.Embedding):
    """`nn.Embedding` with packed weight; may share it with a tied output layer."""

    def forward(self, input: Tensor) -> Tensor:
        parameters = self._parameters
        packed = self.lowbit["weight"]
        return embedding(
            input, parameters["weight"], parameters["weight_scale"], parameters["weight_zero_point"],
            packed.scheme.bits, packed.in_features, packed.scheme.block, self.output_like.dtype,
        )  # fmt: skip

    def remember_dtype(self, dtype: torch.dtype, device=None) -> None:
        """Output dtype, kept as an empty buffer so that `.to(dtype)` changes it as it does a dense table's."""
        self.register_buffer("output_like", torch.empty(0, dtype=dtype, device=device), persistent=False)


class LowBitScaledEmbedding(LowBitEmbedding):
    """For tables whose own forward is `embed_scale` times their parent's, cast to the dtype of the weight (Gemma)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embed_scale.to(self.output_like.dtype)
