"""Models that are easy to get wrong: tied heads, modules used twice, frozen parts, adapters, layers of no size."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

import hf_lowbit as lb
from hf_lowbit.nn.arming import trainable_modules
from tests.quantizers.architectures import BY_ID
from tests.training.runs import Sentences, arguments, different, model, snapshot


def run(folder, made, **fields):
    callback = lb.DQTCallback()
    Trainer(model=made, args=arguments(folder, **fields), train_dataset=Sentences(), callbacks=[callback]).train()
    return callback


def test_a_tied_head_stays_tied_and_float(tmp_path):
    made = model("llama-tied")
    head, table = made.get_output_embeddings(), made.get_input_embeddings()
    before = table.weight.detach().clone()
    callback = run(tmp_path / "run", made, max_steps=3)
    assert callback.changed_codes > 0 and head.weight is table.weight
    assert head.weight.dtype == torch.float32 and not torch.equal(table.weight, before)
    made.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    ids = Sentences().ids[:2]
    made.eval()
    assert torch.equal(loaded.eval()(input_ids=ids).logits, made(input_ids=ids).logits)


class Twice(nn.Module):
    """One layer under two names, used twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = self.first

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_a_layer_of_two_names_moves_once_by_the_sum_of_its_gradients():
    torch.manual_seed(0)
    made, x = lb.quantize(Twice(), lb.DQTConfig(bits=8)), torch.randn(4, 16)
    assert made.second is made.first
    optimizer = lb.DQTOptimizer(made, lr=1e-2, optimizer="sgd", momentum=0.0)
    weight = made.first.weight
    made(x).square().sum().backward()
    both = weight.grad.clone()
    weight.grad = None
    # the same function, with the inner use cut off from the graph, and then the outer one
    inner = torch.tanh(made.first(x))
    parts = []
    made.first(inner.detach()).square().sum().backward()
    parts.append(weight.grad.clone())
    weight.grad = None
    outer = made.first(inner.detach().requires_grad_())
    slope = torch.autograd.grad(outer.square().sum(), outer)[0] @ made.first.weight.detach()
    inner.backward(slope)
    parts.append(weight.grad.clone())
    assert torch.allclose(both, parts[0] + parts[1], rtol=1e-4, atol=1e-5)
    weight.grad = both
    optimizer.step()
    assert list(optimizer.last_step.moved) == ["first.weight"]


def test_frozen_layers_stay_in_the_trainer(tmp_path):
    made = model()
    for name, module in trainable_modules(made):
        if name.endswith("q_proj"):
            module.weight.requires_grad_(False)
    before = snapshot(made)
    callback = run(tmp_path, made, max_steps=3)
    changed = different(before, snapshot(made))
    assert callback.changed_codes > 0 and not any("q_proj" in name for name in changed)
    assert not any("q_proj" in name for name in callback.last_step.moved)


def test_adapters_beside_the_callback_are_refused(tmp_path):
    """PEFT freezes the codes: there is nothing for the callback."""
    adapted = get_peft_model(model(), LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="frozen.*adapters on frozen weights need none"):
        run(tmp_path, adapted)


@pytest.mark.parametrize("sizes", [(0, 8), (8, 0)], ids=["no-inputs", "no-outputs"])
@pytest.mark.parametrize("bits", [8, 3, "ternary"])
def test_layers_without_weights_stay_float_beside_others(bits, sizes):
    layers = nn.ModuleList([nn.Linear(*sizes), nn.Linear(8, 8)])
    made = lb.quantize(layers, lb.DQTConfig(bits=bits))
    optimizer = lb.DQTOptimizer(made, lr=0.1)
    loss = made[0](torch.randn(2, sizes[0])).sum() + made[1](torch.randn(2, 8)).sum()
    loss.backward()
    optimizer.step()
    assert sum(moved.changed for moved in optimizer.last_step.moved.values()) > 0


@pytest.mark.parametrize("size", [0, -8, 2.5], ids=str)
def test_a_group_of_no_size_is_refused(size):
    with pytest.raises((TypeError, ValueError), match=f"`group_size`={size}"):
        lb.DQTConfig(bits=4, group_size=size)


def test_a_group_of_parameters_without_any_is_left_alone():
    made = model(bits=8)
    optimizer = lb.DQTOptimizer([{"params": list(made.parameters()), "lr": 3e-3}, {"params": [], "lr": 1.0}])
    ids = Sentences().ids[:2]
    made(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert sum(moved.changed for moved in optimizer.last_step.moved.values()) > 0


def test_one_layer_of_one_weight_trains_in_every_width_of_states():
    for state_bits in (32, 16, 8, 4):
        layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(layer.weight)
        made = lb.quantize(nn.Sequential(layer), lb.DQTConfig(bits=8))
        optimizer = lb.DQTOptimizer(made, lr=0.1, state_bits=state_bits)
        before = int(made[0].codes())
        made(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        # a tenth of the weight, as the first step of Adam is the learning rate
        assert before - int(made[0].codes()) in (12, 13)


def test_an_encoder_decoder_with_a_shared_table(tmp_path):
    """T5 uses one table three times; it stays float, and its sharing is kept."""
    made = lb.quantize(BY_ID["t5-relu"].build(), lb.DQTConfig(bits=8))
    callback = run(tmp_path, made, max_steps=2)
    assert callback.changed_codes > 0
    assert made.encoder.embed_tokens.weight is made.decoder.embed_tokens.weight
