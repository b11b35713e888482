"""Which blocks of a weight live: scores of blocks, the best of them, and prune-and-grow.

W [N, K] is seen as blocks of bn x bk, NB = ceil(N/bn) rows and KB = ceil(K/bk) columns of them; blocks that reach over
the edge are padded with zeros. A mask is bool [NB, KB]. Scores of a block B of W:

    fro    sqrt(sum_B W^2)                     the paper's norm, as far as it is known
    l1     sum_B |W|                           Graphcore's block prune-and-grow
    act    sum_B W[n, k]^2 E[x_k^2]            activation-weighted, after Wanda (Sun et al. 2023)

Prune-and-grow with k live blocks (RigL, Evci et al. 2020, on blocks; Okanovic et al. 2025), S_W the scores of the
weight and S_G those of its dense gradient:

    none     top_k(S_W)
    budget   top_{k-g}(S_W), and the g best others by S_G
    union    top_k(S_W) and top_k(S_G): up to 2k blocks live until the next update

Taken per block row (`balance="row"`) every row keeps k / NB. Equal scores are decided by position, so that equal
inputs give equal masks on every process and device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


SCORES = ("fro", "l1", "act")
GROWTHS = ("budget", "union", "none")


def block_view(dense: Tensor, block: tuple[int, int]) -> Tensor:
    """dense [N, K] -> [NB, bn, KB, bk], a view where blocks divide the weight and a padded copy elsewhere."""
    rows, columns = dense.shape
    padding = (-columns % block[1], -rows % block[0])
    if any(padding):
        dense = F.pad(dense, (0, padding[0], 0, padding[1]))
    return dense.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))


def block_scores(
    dense: Tensor, block: tuple[int, int], score: str = "fro", mean_square: Tensor | None = None
) -> Tensor:
    """Scores float32 [NB, KB] of the blocks of `dense` [N, K]; "act" needs `mean_square` [K], the E[x_k^2]."""
    values = dense.detach().to(torch.float32)
    if score == "l1":
        return block_view(values, block).abs().sum(dim=(1, 3))
    if score == "fro":
        return block_view(values, block).square().sum(dim=(1, 3)).sqrt()
    if score != "act" or mean_square is None:
        raise ValueError(f"`score`={score!r} is not one of {list(SCORES)}, or lacks the mean squares of the input.")
    return block_view(values.square() * mean_square.to(torch.float32), block).sum(dim=(1, 3))


def best_blocks(scores: Tensor, count: int, balance: str) -> Tensor:
    """Mask of the `count` best blocks by `scores` [NB, KB]: in each row ("row") or in all ("none")."""
    flat = scores if balance == "row" else scores.reshape(1, -1)
    order = flat.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(1, order, True).view(scores.shape)


def prune_and_grow(
    weight_scores: Tensor, gradient_scores: Tensor | None, count: int, grow: str, fraction: float, balance: str
) -> Tensor:
    """The next mask with `count` live blocks (per row, or in all); `fraction` of them are grown under "budget".

    `gradient_scores` None, or not finite, grows nothing.
    """
    usable = gradient_scores is not None and bool(torch.isfinite(gradient_scores).all())
    if grow == "none" or not usable:
        return best_blocks(weight_scores, count, balance)
    if grow == "union":
        return best_blocks(weight_scores, count, balance) | best_blocks(gradient_scores, count, balance)
    grown = int(fraction * count)
    kept = best_blocks(weight_scores, count - grown, balance)
    # what is kept comes last, whatever its gradient
    return kept | best_blocks(gradient_scores.masked_fill(kept, -1.0), grown, balance)


def clear_dead(dense: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """A copy of `dense` [N, K] with exact zeros (never -0.0, never NaN) in the dead blocks of `mask`."""
    view = block_view(dense, block)
    cleared = view.masked_fill(~mask[:, None, :, None], 0.0)
    return cleared.flatten(2, 3).flatten(0, 1)[: dense.shape[0], : dense.shape[1]]


def clear_dead_(dense: Tensor, mask: Tensor, block: tuple[int, int]) -> None:
    """`clear_dead` in place."""
    rows, columns = dense.shape
    if rows % block[0] or columns % block[1]:
        dense.copy_(clear_dead(dense, mask, block))
    else:
        block_view(dense, block).masked_fill_(~mask[:, None, :, None], 0.0)


def live_mask(dense: Tensor, block: tuple[int, int]) -> Tensor:
    """Mask of the blocks that hold a number other than zero (-0.0 is zero)."""
    return (block_view(dense.detach(), block) != 0).any(dim=3).any(dim=1)


def is_clear(dense: Tensor, mask: Tensor, block: tuple[int, int]) -> bool:
    """Whether the dead blocks of `mask` hold zeros only."""
    return not bool((live_mask(dense, block) & ~mask).any())


def columns_of(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Columns of the live blocks int32: [NB, L] and None where every row has as many, else [nnz] and row pointers
    int32 [NB + 1]."""
    counts = mask.sum(dim=1)
    columns = mask.nonzero()[:, 1].to(torch.int32)
    if bool((counts == counts[0]).all()):
        return columns.view(mask.shape[0], -1), None
    pointers = torch.zeros(len(counts) + 1, dtype=torch.int32, device=mask.device)
    pointers[1:] = counts.cumsum(0)
    return columns, pointers


def mask_of(columns: Tensor, pointers: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """The reverse of `columns_of`: mask [NB, KB]."""
    mask = torch.zeros(shape, dtype=torch.bool, device=columns.device)
    if pointers is None:
        return mask.scatter_(1, columns.long(), True)
    rows = torch.arange(shape[0], device=columns.device).repeat_interleave(pointers.diff().long())
    mask[rows, columns.long()] = True
    return mask
