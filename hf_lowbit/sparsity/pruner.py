"""`BlockPruner`: prune-and-grow over all block-sparse weights of a model, independent of who runs the training loop.

Around each step of an optimizer (what `BlastCallback` does in a Trainer):

    pruner.before_step(i)      i counts from 1; asks for dense gradients where blocks may grow after this step
    ... forward, backward, clipping, optimizer.step() ...
    pruner.after_step(i)       at an update: new masks, moments of changed blocks to zero; always: dead blocks to zero

Under several processes the dense gradients and the input statistics are averaged, so that all of them find the same
masks; each has the same weights already. The state is a dict of plain tensors, for an optimizer's state.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..configs.blast import kept_blocks
from ..functional.block_masks import block_scores, clear_dead_, prune_and_grow
from ..nn.masked_codes import MaskedCodes
from ..nn.masked_weight import MaskedWeight
from ..nn.sparsify import clear_module, mask_groups, masked_modules
from .schedule import Schedule


class BlockPruner:
    """Moves the masks of `model` along `schedule`.

    Args:
        score: "fro", "l1" or "act" (functional/block_masks.py).
        grow: "none", "budget" or "union".
        reset_optimizer_state: zero the moments of blocks that were pruned or grown.
        compute: "auto" runs the product and gradients on live blocks where that was measured to be no slower
            (functional/block_crossover.py), "dense" never, "sparse" always.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        score: str = "fro",
        grow: str = "none",
        reset_optimizer_state: bool = True,
        compute: str = "auto",
    ):
        self.schedule, self.score, self.grow = schedule, score, grow
        self.reset_optimizer_state, self.compute = reset_optimizer_state, compute
        self.modules = dict(masked_modules(model))
        # blocks that died and were born at the last update
        self.pruned = self.grown = 0

    def attach(self) -> None:
        """Take charge of the layers: they may be trained from here on."""
        for module in self.modules.values():
            module.controlled = True
            clear_module(module)
            module.sparse_compute = {"auto": "auto", "dense": False, "sparse": True}[self.compute]

    def release(self) -> None:
        """Leave the layers as they are."""
        for module in self.modules.values():
            module.controlled = module.wants_dense_gradient = module.collects_inputs = False
            module.dense_gradient = module.input_squares = None

    def before_step(self, step: int) -> None:
        """Prepare step number `step`."""
        update = self.schedule.updates(step)
        grows = update and self.grow != "none" and step < self.schedule.freeze
        for module in self.modules.values():
            module.wants_dense_gradient = grows
            module.collects_inputs = update and self.score == "act"
            module.dense_gradient = module.input_squares = None

    def after_step(self, step: int, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Finish step number `step`; whether masks were updated."""
        update = self.schedule.updates(step)
        if update:
            self.pruned = self.grown = 0
        for group in mask_groups(self.modules) if update else ():
            self._update(group, step, optimizer)
        for module in self.modules.values():
            clear_module(module)
            module.wants_dense_gradient = module.collects_inputs = False
            module.dense_gradient = module.input_squares = None
        return update

    def finish(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Prune to the targets at once: the schedule was longer than the training."""
        self.after_step(self.schedule.freeze, optimizer)

    @property
    def sparsity(self) -> float:
        """Measured share of dead blocks over all layers, weighted by their blocks."""
        blocks = sum(module.mask.numel() for module in self.modules.values())
        return 1 - sum(int(module.mask.sum()) for module in self.modules.values()) / blocks

    def state(self) -> dict[str, Tensor]:
        """Masks by name, uint8."""
        return {name: module.mask.to(torch.uint8).cpu() for name, module in self.modules.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Put saved masks back. Raises ValueError when they are of other layers or blocks."""
        for name, module in self.modules.items():
            mask = state.get(name)
            if mask is None or tuple(mask.shape) != module.layout.mask_shape:
                found = None if mask is None else tuple(mask.shape)
                raise ValueError(
                    f"the checkpoint's mask of `{name}` has shape {found}, the model's is {module.layout.mask_shape}: "
                    "resume with the `block_size` and `targets` the run was started with."
                )
            module.mask = mask.to(device=module.parameter.device, dtype=torch.bool)

    def _update(self, group: list[MaskedWeight], step: int, optimizer: torch.optim.Optimizer | None) -> None:
        """A new mask for the layers of `group`, by the sum of their scores."""
        module, layout = group[0], group[0].layout
        sparsity = self.schedule.sparsity(step, module.target)
        mask = prune_and_grow(
            sum(self._scores(m) for m in group), self._gradient_scores(group), kept_blocks(sparsity, layout.pool),
            "none" if step >= self.schedule.freeze else self.grow, self.schedule.grown(step), layout.balance,
        )  # fmt: skip
        for member in group:
            changed = mask ^ member.mask
            self.grown += int((changed & mask).sum())
            self.pruned += int((changed & ~mask).sum())
            member.mask = mask
            if optimizer is not None and self.reset_optimizer_state:
                reset_blocks(optimizer, member, changed)

    def _scores(self, module: MaskedWeight) -> Tensor:
        weight = module.oriented().detach()
        return block_scores(weight, module.layout.block, self.score, self._mean_square(module))

    def _mean_square(self, module: MaskedWeight) -> Tensor | None:
        if self.score != "act":
            return None
        if module.input_squares is None:
            # no token reached this layer in this step (or the last prune comes after training): every input counts
            # the same
            sums = torch.ones(*module.layout.experts, module.layout.in_features + 1, device=module.parameter.device)
        else:
            sums = _summed(module.input_squares)
        squares, count = sums[..., :-1], sums[..., -1:]
        # the same for an expert that got no token
        return torch.where(count > 0, squares / count.clamp(min=1), 1.0)

    def _gradient_scores(self, group: list[MaskedWeight]) -> Tensor | None:
        if not group[0].wants_dense_gradient:
            return None
        # every process has to take part in the sums, with or without a gradient of its own
        gradients = [torch.zeros_like(m.oriented()) if m.dense_gradient is None else m.dense_gradient for m in group]
        return sum(block_scores(_summed(gradient), group[0].layout.block) for gradient in gradients)


def reset_blocks(optimizer: torch.optim.Optimizer, module: MaskedWeight, changed: Tensor) -> None:
    """Zero the state of the blocks in `changed` [..., NB, KB]: the optimizer's, and that of direct updates."""
    weight, layout = module.parameter, module.layout
    direct = getattr(getattr(optimizer, "_hf_lowbit_callback", optimizer), "updater", None)
    if direct is not None:
        rows = changed.repeat_interleave(layout.block[0], 0)[: layout.out_features]
        where = rows.repeat_interleave(layout.block[1], 1)[:, : layout.in_features]
        direct.forget(weight, where.t() if layout.transposed else where)
        if isinstance(module, MaskedCodes):
            direct.forget(module._parameters["weight_scale"], rows)
    for tensor in optimizer.state.get(weight, {}).values():
        if isinstance(tensor, Tensor) and tensor.shape == weight.shape:
            oriented = tensor.transpose(-1, -2) if layout.transposed else tensor
            clear_dead_(oriented, ~changed, layout.block)


def _summed(tensor: Tensor) -> Tensor:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return tensor
    total = tensor.to(torch.float32).contiguous()
    total = total.clone() if total.data_ptr() == tensor.data_ptr() else total
    dist.all_reduce(total)
    return total
