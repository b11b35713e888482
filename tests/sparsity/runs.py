"""What the block-sparsity tests share: a tiny model, the real Trainer, and callbacks that look at every step."""

import torch
from transformers import Trainer, TrainerCallback

import hf_lowbit as lb
from hf_lowbit.functional.block_masks import block_view
from hf_lowbit.nn.sparsify import masked_modules
from tests.quantizers.architectures import BY_ID
from tests.training.runs import Sentences, arguments


# codes trained in the live blocks and beside them
DIRECT = {"bits": 8, "rest": lb.DQTConfig(8)}


def model(architecture="llama", **fields):
    """A model of the zoo that is going to be pruned, always with the same numbers."""
    given = {"sparsity": 0.75, "block_size": 8, **fields}
    return lb.quantize(BY_ID[architecture].build(), lb.BlastConfig(**given))


def callback(**fields):
    return lb.BlastCallback(**{"step_size": 3, "grow": "budget", "grow_fraction": 0.6, **fields})


def train(folder, made, blast, resume=None, watchers=(), **fields):
    """Train with the real Trainer: AdamW with momentum and weight decay."""
    given = {"max_steps": 20, "weight_decay": 0.1, **fields}
    callbacks = [blast, *watchers] if blast is not None else list(watchers)
    trainer = Trainer(model=made, args=arguments(folder, **given), train_dataset=Sentences(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def dead(module):
    """The numbers in the dead blocks of a masked layer."""
    view = block_view(module.oriented().detach(), module.layout.block)
    return view.transpose(-3, -2)[~module.mask]


class Watch(TrainerCallback):
    """After every step: masks, whether dead blocks are exact zeros, and dead moments. Comes after BlastCallback."""

    def __init__(self):
        self.masks, self.norms = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for _, module in masked_modules(model):
            gradient = module.weight.grad
            gradient = gradient.transpose(-1, -2) if module.layout.transposed else gradient
            view = block_view(gradient, module.layout.block).transpose(-3, -2)
            assert (view[~module.mask] == 0).all()

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        for name, module in masked_modules(model):
            assert (dead(module) == 0).all(), (state.global_step, name)
            moments = optimizer.state[module.weight]
            for key in ("exp_avg", "exp_avg_sq"):
                if key in moments:
                    tensor = moments[key].transpose(-1, -2) if module.layout.transposed else moments[key]
                    assert (block_view(tensor, module.layout.block).transpose(-3, -2)[~module.mask] == 0).all()
        self.masks.append({name: module.mask.clone() for name, module in masked_modules(model)})


class WatchCodes(TrainerCallback):
    """The same for codes: before anybody clears them, dead ones have not moved; dead and newborn moments are zero.
    Comes after both callbacks."""

    def __init__(self):
        self.masks = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        # direct updates have been made, and nothing has been cleared since
        for name, module in masked_modules(model):
            assert (dead(module) == 0).all(), (state.global_step, name)

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        updater = optimizer.optimizer._hf_lowbit_callback.updater
        before = self.masks[-1] if self.masks else {}
        self.masks.append({name: module.mask.clone() for name, module in masked_modules(model)})
        for name, module in masked_modules(model):
            assert (dead(module) == 0).all(), (state.global_step, name)
            leaf = next(leaf for leaf in updater.leaves.values() if leaf.parameter is module.weight)
            newborn = module.mask & ~before.get(name, module.mask)
            first = updater.states(leaf).read(slice(None))["m"]
            blocks = block_view(first, module.layout.block).transpose(1, 2)
            assert (blocks[~module.mask] == 0).all() and (blocks[newborn] == 0).all()
            assert (blocks[module.mask & ~newborn] != 0).any()


def snapshot(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def different(one, other):
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
