"""`DenseShape`: what follows from a weight's dense shape, for everything that stores it in another form."""

from __future__ import annotations

import math


class DenseShape:
    """Mixin of descriptions with the fields `shape`, as the model defines it: [N, K], [K, N] (`transposed`), or with a
    leading E for fused experts."""

    @property
    def out_features(self) -> int:
        return self.shape[-1] if self.transposed else self.shape[-2]

    @property
    def in_features(self) -> int:
        return self.shape[-2] if self.transposed else self.shape[-1]

    @property
    def experts(self) -> tuple[int, ...]:
        """(E,) for fused experts, () else."""
        return self.shape[:-2]

    @property
    def parameters(self) -> int:
        """Number of dense weights."""
        return math.prod(self.shape)
