"""The block stage: it finds blocks anywhere, only improves, and leaves nothing behind but better codes and scales."""

import copy

import pytest
import torch
from torch import nn

import hf_lowbit as lb
from hf_lowbit.compression.calls import forward
from hf_lowbit.compression.refine.blocks import refine_blocks
from hf_lowbit.compression.refine.calls import find_blocks, record
from hf_lowbit.nn.packed import LowBitModule
from tests.compression.refine.architectures import make


STACKS = {"llama": 1, "bert": 1, "bert-without-head": 1, "t5": 2, "whisper": 2, "vit": 1, "gpt2": 1, "mixtral": 1}


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(before, after):
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def outputs(model, batch):
    with torch.no_grad():
        return forward(model, batch)[0]


@pytest.mark.parametrize("name", STACKS)
def test_blocks_are_found(name):
    stacks = find_blocks(make(name).model)
    assert len(stacks) == STACKS[name]
    assert all(len(blocks) == 2 for _, blocks in stacks)


def test_every_block_is_refined_and_none_is_worse(case):
    results = refine_blocks(case.model, case.dense, case.batches, case.held_out, steps=12)
    assert not [result.reason for result in results if result.reason]
    assert all(result.after < result.before for result in results if result.kept)
    assert sum(result.kept for result in results) >= len(results) / 2


def test_what_is_refined_is_what_is_saved(case, tmp_path):
    refine_blocks(case.model, case.dense, case.batches, case.held_out, steps=3)
    expected = outputs(case.model, case.held_out[0])
    case.model.save_pretrained(tmp_path)
    loaded = type(case.dense).from_pretrained(tmp_path).eval()
    assert torch.equal(outputs(loaded, case.held_out[0]), expected)


def test_nothing_else_changes(case):
    case.model.train()
    next(case.dense.parameters()).requires_grad_(False)
    before = state(case.dense)
    flags = [[p.requires_grad for p in m.parameters()] for m in (case.model, case.dense)]
    shapes = {name: (p.dtype, p.shape) for name, p in case.model.named_parameters()}
    generator = torch.get_rng_state()
    refine_blocks(case.model, case.dense, case.batches, case.held_out, steps=2)
    assert same(before, state(case.dense))
    assert flags == [[p.requires_grad for p in m.parameters()] for m in (case.model, case.dense)]
    assert shapes == {name: (p.dtype, p.shape) for name, p in case.model.named_parameters()}
    assert torch.equal(generator, torch.get_rng_state())
    assert all(p.grad is None for m in (case.model, case.dense) for p in m.parameters())
    assert all(m.training for m in case.model.modules())
    assert not any(m.training for m in case.dense.modules())
    assert not any(m._forward_hooks for model in (case.model, case.dense) for _, s in find_blocks(model) for m in s)


@pytest.mark.parametrize("scheme", [("ternary", 16, None), (2, 20, None), (4, None, None), (8, "tensor", None)],
                         ids=["ternary", "ragged-groups", "per-channel", "per-tensor"])  # fmt: skip
def test_every_scheme(scheme):
    case = make("llama", *scheme)
    results = refine_blocks(case.model, case.dense, case.batches, case.held_out, steps=4)
    assert not any(result.reason for result in results)
    for module in case.model.modules():
        for name in getattr(module, "lowbit", ()):
            codes, scale, zero_point = lb.codes(module, name)
            assert bool((scale > 0).all())
            assert zero_point is None or zero_point.dtype == torch.int8


def test_a_block_that_gets_worse_is_restored():
    case = make("llama")
    before = state(case.model)
    # a rate this large ruins every block
    results = refine_blocks(case.model, case.dense, case.batches, case.held_out, steps=2, learning_rate=30.0)
    assert not any(result.kept for result in results)
    assert same(before, state(case.model))


def test_a_block_whose_codes_should_not_move_is_tuned_without():
    case = make("llama")
    before = {name: lb.codes(m)[0].clone() for name, m in case.model.named_modules() if isinstance(m, LowBitModule)}
    # codes thrown about by whole steps can only do harm
    results = refine_blocks(case.model, case.dense, case.batches, case.held_out, steps=12, rounding_rate=2.0)
    assert any(result.kept for result in results) and not any(result.moved for result in results)
    assert all(torch.equal(lb.codes(case.model.get_submodule(name))[0], codes) for name, codes in before.items())


def test_the_same_seed_gives_the_same_bytes():
    states = []
    for _ in range(2):
        case = make("llama")
        refine_blocks(case.model, case.dense, case.batches, case.held_out, steps=5, seed=3)
        states.append(state(case.model))
    assert same(*states)


def test_a_recording_repeats_each_block(case):
    for name, blocks in find_blocks(case.model):
        calls = record(case.model, blocks, case.batches)
        assert all(len(made) == len(case.batches) for made in calls), name
        assert [made[0].chained for made in calls] == [False, True]


class Draws(nn.Module):
    """A block whose output is another at each call where `noise` is not 0."""

    def __init__(self, block, noise=1.0):
        super().__init__()
        self.block, self.noise = block, noise

    def forward(self, hidden_states, **kwargs):
        return self.block(hidden_states, **kwargs) * (1 + self.noise * torch.rand(()))


def test_a_block_that_does_not_repeat_itself_is_skipped_and_the_next_is_not():
    case = make("llama")
    for model in (case.model, case.dense):
        first, second = model.model.layers
        model.model.layers = nn.ModuleList([Draws(first), Draws(second, noise=0.0)])
    before = state(case.model)
    skipped, refined = refine_blocks(case.model, case.dense, case.batches, case.held_out, steps=8)
    assert "repeat" in skipped.reason
    assert refined.reason is None
    assert refined.kept
    changed = {name for name, tensor in state(case.model).items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(name.startswith("model.layers.1.") for name in changed)


class Apart(nn.Module):
    """A model whose blocks do not hand over to each other: something is added in between."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, attention_mask=None, **kwargs):
        hook = self.model.model.layers[0].register_forward_hook(lambda module, args, output: output + 0.1)
        inner = [self.model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.1, *args[1:]))]
        try:
            return self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        finally:
            for handle in (hook, *inner):
                handle.remove()


def test_blocks_with_something_in_between_are_recorded_again():
    case = make("llama")
    results = refine_blocks(Apart(case.model), Apart(case.dense), case.batches, case.held_out, steps=8)
    assert [result.reason for result in results] == [None, None]
    assert any(result.kept for result in results)


def test_a_model_without_blocks_is_skipped_with_a_sentence(warnings_told):
    case = make("llama")
    for model in (case.model, case.dense):
        model.model.layers = nn.ModuleList(list(model.model.layers)[:1])
    assert refine_blocks(case.model, case.dense, case.batches, case.held_out) == []
    assert "skipped: LlamaForCausalLM has no repeated blocks" in warnings_told()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"batches": []}, "`batches` is empty", id="no-batches"),
        pytest.param({"held_out": []}, "`held_out` is empty", id="nothing-held-out"),
        pytest.param({"steps": 0}, "`steps`=0", id="no-steps"),
        pytest.param({"targets": "labels"}, "`targets`='labels'", id="unknown-targets"),
    ],
)
def test_bad_arguments_are_refused_before_work(change, words):
    case = make("llama")
    arguments = {"batches": case.batches, "held_out": case.held_out, **change}
    with pytest.raises(ValueError, match=words):
        refine_blocks(case.model, case.dense, **arguments)


def test_the_dense_model_may_be_frozen():
    case = make("llama")
    case.dense.requires_grad_(False)
    model = copy.deepcopy(case.model)
    results = [refine_blocks(m, case.dense, case.batches, case.held_out, steps=2) for m in (case.model, model)]
    assert results[0] == results[1]
