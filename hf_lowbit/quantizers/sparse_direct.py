"""Direct training beside block sparsity: codes while blocks are pruned, and low-bit layers when that has ended.

With `rest`=DQTConfig the layers that are not sparse become trainable codes once the dense weights are there, and with
`bits` those that are pruned do too. While that lasts a checkpoint lists both among the low-bit modules of `rest`;
those that are pruned have a block layout of form "codes" beside it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..configs.blast import BlastConfig, BlockLayout
from ..configs.dqt import DQTConfig
from ..configs.lowbit import LowBitConfig
from ..nn.arming import disarm
from ..nn.packed import LowBitModule
from ..nn.sparse_experts import MaskedStack
from ..nn.sparsify import become_codes, become_masked_codes, masked_modules
from ..nn.swap import convert, flatten_head
from ..nn.targets import Target, decide, find_targets
from ..nn.trainable import TrainableModule, Training
from .armed import arm_codes, gradient_dtype
from .checkpoint import _spellings


def rest_targets(model: nn.Module, config: BlastConfig) -> list[Target]:
    """The layers that `rest` converts. Raises ValueError when its patterns match nothing, and when it is for nothing:
    live blocks whose codes are trained may be all there is."""
    blocks = config.rest.training is not None and config.bits is not None
    targets = (decide if blocks else find_targets)(model, config.rest)
    return [target for target in targets if target.packed is not None]


def start_direct(model: nn.Module, config: BlastConfig) -> None:
    """Let the codes of a dense model that is going to be pruned be trained; nothing without a `DQTConfig`.

    Raises ValueError for NaN or infinity (the layer is named), and when nothing can be trained so.
    """
    rest = config.rest
    if rest is None or rest.training is None:
        return
    training, dtype = Training(None, rest.scale == "learned"), gradient_dtype(model, rest)
    targets = rest_targets(model, config)
    for name, module in masked_modules(model) if config.bits is not None else ():
        if isinstance(module, MaskedStack):
            raise ValueError(
                f"`rest`=DQTConfig with `bits`={config.bits!r} trains the codes of live blocks, and `{name}` is a "
                "stack of fused experts, whose codes can't be trained. Keep its blocks float (`bits`=None), or leave "
                "the experts out by `modules_to_not_convert`."
            )
        try:
            become_codes(module, config.bits, rest.group_size, training, dtype)
        except ValueError as error:
            raise ValueError(f"`{name}`: {error}. Repair the checkpoint or leave the module dense.") from None
    if targets:
        convert(targets)
        flatten_head(model)
    arm_codes(model, rest)


def continue_direct(
    model: nn.Module, config: BlastConfig, aim: Callable[[str, BlockLayout], tuple[BlockLayout, float]]
) -> None:
    """Let the codes of a checkpoint of training be trained further; nothing when it holds none."""
    rest = config.rest
    if rest is None or rest.training is None or not rest.is_resolved:
        return
    arm_codes(model, rest)
    modules = dict(model.named_modules())
    for name, layout in config.layouts.items():
        if layout.form == "codes":
            found = next((n for n in _spellings(name, model) if isinstance(modules.get(n), TrainableModule)), None)
            if found is not None:
                become_masked_codes(modules[found], *aim(name, layout))


def end_direct(model: nn.Module, rest: DQTConfig) -> LowBitConfig | None:
    """Freeze the codes that are not sparse, and the config they have then; None when there are none."""
    disarm(model)
    return rest.frozen() if any(isinstance(module, LowBitModule) for module in model.modules()) else None
