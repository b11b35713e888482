"""Which blocks of a weight live: scores of blocks, the best of them, and prune-and-grow.

W [N, K] is seen as blocks of bn x bk, NB = ceil(N/bn) rows and KB = ceil(K/bk) columns of them; blocks that reach over
the edge are padded with zeros. A mask is bool [NB, KB]. Experts are matrices of their own: all of this holds for
[E, N, K], with masks [E, NB, KB]. Scores of a block B of W:

    fro    sqrt(sum_B W^2)                     the paper's norm, as far as it is known
    l1     sum_B |W|                           Graphcore's block prune-and-grow
    act    sum_B W[n, k]^2 E[x_k^2]            activation-weighted, after Wanda (Sun et al. 2023)

Prune-and-grow with k live blocks (RigL, Evci et al. 2020, on blocks; Okanovic et al. 2025), S_W the scores of the
weight and S_G those of its dense gradient:

    none     top_k(S_W)
    budget   top_{k-g}(S_W), and the g best others by S_G
    union    top_k(S_W) and top_k(S_G): up to 2k blocks live until the next update

Taken per block row (`balance="row"`) every row keeps k / NB. Equal scores are decided by position, so that equal
inputs give equal masks on every process and device. A matrix whose gradient is zero throughout (an expert that got no
token) says nothing about its blocks: none of them grow.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


SCORES = ("fro", "l1", "act")
GROWTHS = ("budget", "union", "none")


def block_view(dense: Tensor, block: tuple[int, int]) -> Tensor:
    """dense [..., N, K] -> [..., NB, bn, KB, bk]: a view where blocks divide the weight, a padded copy elsewhere."""
    rows, columns = dense.shape[-2:]
    padding = (-columns % block[1], -rows % block[0])
    if any(padding):
        dense = F.pad(dense, (0, padding[0], 0, padding[1]))
    return dense.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))


def block_scores(
    dense: Tensor, block: tuple[int, int], score: str = "fro", mean_square: Tensor | None = None
) -> Tensor:
    """Scores float32 [..., NB, KB] of the blocks of `dense` [..., N, K]; "act" needs `mean_square` [..., K], the
    E[x_k^2]."""
    values = dense.detach().to(torch.float32)
    if score == "l1":
        return block_view(values, block).abs().sum(dim=(-3, -1))
    if score == "fro":
        return block_view(values, block).square().sum(dim=(-3, -1)).sqrt()
    if score != "act" or mean_square is None:
        raise ValueError(f"`score`={score!r} is not one of {list(SCORES)}, or lacks the mean squares of the input.")
    return block_view(values.square() * mean_square.to(torch.float32).unsqueeze(-2), block).sum(dim=(-3, -1))


def best_blocks(scores: Tensor, count: int, balance: str) -> Tensor:
    """Mask of the `count` best blocks by `scores` [..., NB, KB]: in each row ("row"), or in each matrix ("none")."""
    flat = scores if balance == "row" else scores.flatten(-2)
    order = flat.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, order, True).view(scores.shape)


def prune_and_grow(
    weight_scores: Tensor, gradient_scores: Tensor | None, count: int, grow: str, fraction: float, balance: str
) -> Tensor:
    """The next mask with `count` live blocks (per row, or per matrix); `fraction` of them are grown under "budget".

    `gradient_scores` None, or not finite, grows nothing.
    """
    by_weight = best_blocks(weight_scores, count, balance)
    usable = gradient_scores is not None and bool(torch.isfinite(gradient_scores).all())
    if grow == "none" or not usable:
        return by_weight
    if grow == "union":
        mask = by_weight | best_blocks(gradient_scores, count, balance)
    else:
        grown = int(fraction * count)
        kept = best_blocks(weight_scores, count - grown, balance)
        # what is kept comes last, whatever its gradient
        mask = kept | best_blocks(gradient_scores.masked_fill(kept, -1.0), grown, balance)
    silent = gradient_scores.amax(dim=(-2, -1), keepdim=True) <= 0
    return torch.where(silent, by_weight, mask)


def clear_dead(dense: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """A copy of `dense` [..., N, K] with exact zeros (never -0.0, never NaN) in the dead blocks of `mask`."""
    rows, columns = dense.shape[-2:]
    return join_blocks(block_view(dense, block).masked_fill(~mask[..., :, None, :, None], 0.0), rows, columns)


def join_blocks(view: Tensor, rows: int, columns: int) -> Tensor:
    """The reverse of `block_view`: [..., NB, bn, KB, bk] -> [..., N, K], without what reaches over the edge."""
    return view.flatten(-2).flatten(-3, -2)[..., :rows, :columns]


def clear_dead_(dense: Tensor, mask: Tensor, block: tuple[int, int]) -> None:
    """`clear_dead` in place."""
    rows, columns = dense.shape[-2:]
    if rows % block[0] or columns % block[1]:
        dense.copy_(clear_dead(dense, mask, block))
    else:
        block_view(dense, block).masked_fill_(~mask[..., :, None, :, None], 0.0)


def live_mask(dense: Tensor, block: tuple[int, int]) -> Tensor:
    """Mask of the blocks that hold a number other than zero (-0.0 is zero)."""
    return (block_view(dense.detach(), block) != 0).any(dim=-1).any(dim=-2)


def is_clear(dense: Tensor, mask: Tensor, block: tuple[int, int]) -> bool:
    """Whether the dead blocks of `mask` hold zeros only."""
    return not bool((live_mask(dense, block) & ~mask).any())


def columns_of(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Columns of the live blocks int32: [..., NB, L] and None where every row has as many, else [nnz] and row pointers
    int32 [R + 1], with R the rows of all matrices, one after the other."""
    counts = mask.sum(dim=-1).flatten()
    columns = mask.nonzero()[:, -1].to(torch.int32)
    if bool((counts == counts[0]).all()):
        return columns.view(*mask.shape[:-1], int(counts[0])), None
    return columns, F.pad(counts.cumsum(0).to(torch.int32), (1, 0))


def places_of(columns: Tensor, pointers: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Index of the live blocks in a mask of `shape` [..., NB, KB]: expert (where there are any), row and column, each
    of the shape of `columns`."""
    *experts, rows, _ = shape
    count = rows * (experts[0] if experts else 1)
    row = torch.arange(count, device=columns.device)
    if pointers is None:
        row = row.view(*shape[:-1], 1).expand(columns.shape)
    else:
        row = row.repeat_interleave(pointers.diff().long())
    return (row // rows, row % rows, columns.long()) if experts else (row, columns.long())


def mask_of(columns: Tensor, pointers: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """The reverse of `columns_of`: a mask of `shape` [..., NB, KB]."""
    mask = torch.zeros(shape, dtype=torch.bool, device=columns.device)
    mask[places_of(columns, pointers, shape)] = True
    return mask


def gather(dense: Tensor, columns: Tensor, pointers: Tensor | None, block: tuple[int, int]) -> Tensor:
    """Live blocks of `dense` [..., N, K]: [..., NB, L, bn, bk], or [nnz, bn, bk] with row pointers."""
    view = block_view(dense, block).transpose(-3, -2)
    return view[places_of(columns, pointers, view.shape[:-2])]


def scatter(
    values: Tensor, columns: Tensor, pointers: Tensor | None, shape: tuple[int, ...], block: tuple[int, int]
) -> Tensor:
    """The reverse of `gather`: dense of `shape` [..., N, K], zeros elsewhere."""
    *experts, rows, width = shape
    grid = (*experts, -(-rows // block[0]), -(-width // block[1]))
    dense = values.new_zeros(*grid, *block)
    dense[places_of(columns, pointers, grid)] = values
    return join_blocks(dense.transpose(-3, -2), rows, width).contiguous()
