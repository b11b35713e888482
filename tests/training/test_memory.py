"""No float copy of the weights: not in the graph, not in the step, not in the state; bytes counted one by one."""

import pytest
import torch
from torch import nn

import hf_lowbit as lb
from hf_lowbit.nn.slot import CodesParameter
from hf_lowbit.training import step as step_module
from tests.quantizers.live_memory import LiveMemory


WIDTH, LAYERS = 512, 8
DENSE = 4 * WIDTH * WIDTH
# bytes a parameter of the moments, bases and scales included: blocks of 256 at 8 bits, of 128 at 4
STATE_BYTES = {32: 8.0, 16: 4.0, 8: 2.02, 4: 1.04}
WEIGHT_BYTES = {8: 1.01, 4: 0.51, "ternary": 0.26}


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def stack(**fields):
    return lb.quantize(Stack(), lb.DQTConfig(**fields))


class Watch(LiveMemory):
    """What a trainable weight reports to hold is not counted: it holds nothing of its own."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, CodesParameter) for t in types):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("fields", [{"bits": 8}, {"bits": 8, "forward_bits": "ternary"}, {"bits": "ternary"}], ids=str)
def test_the_graph_keeps_no_dense_weight(fields):
    module, kept = stack(**fields), []

    def look(tensor):
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        module(torch.randn(3, WIDTH)).sum().backward()
    assert kept and not [s for s, dtype in kept if s == (WIDTH, WIDTH) and dtype.is_floating_point]


@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize("bits", [8, "ternary"])
def test_a_step_holds_chunks_only(bits, state_bits, monkeypatch):
    monkeypatch.setattr(step_module, "CHUNK", 1 << 13)
    module = stack(bits=bits)
    optimizer = lb.DQTOptimizer(module, state_bits=state_bits)
    for turn in range(2):
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape)
        if turn == 0:
            optimizer.step()
    with Watch() as memory:
        optimizer.step()
    chunk = 4 * step_module.chunk_size(torch.device("cpu"))
    assert memory.largest <= chunk
    # a few dozen tensors of a chunk; less than one layer would take, and far less than the model
    assert memory.peak < DENSE


@pytest.mark.parametrize("state_bits", STATE_BYTES)
@pytest.mark.parametrize("bits", WEIGHT_BYTES)
def test_bytes_of_weights_and_states(bits, state_bits):
    module = stack(bits=bits)
    optimizer = lb.DQTOptimizer(module, state_bits=state_bits)
    module(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    count = LAYERS * WIDTH * WIDTH
    stored = sum(t.numel() * t.element_size() for t in module.state_dict().values())
    states = sum(
        tensor.numel() * tensor.element_size()
        for saved in optimizer.updater.state["weights"].values()
        for name, tensor in saved.items()
        if name != "t"
    )
    assert stored / count <= WEIGHT_BYTES[bits]
    assert states / count <= STATE_BYTES[state_bits]


def test_released_gradients_are_alive_one_at_a_time():
    module, alive = stack(bits=8), []
    parameters = [layer.weight for layer in module.layers]
    for parameter in parameters:
        # before the optimizer's hook, which drops it
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in parameters))
        )
    optimizer = lb.DQTOptimizer(module, release_gradients=True)
    module(torch.randn(2, WIDTH)).sum().backward()
    assert alive == [1] * LAYERS
    optimizer.step()
