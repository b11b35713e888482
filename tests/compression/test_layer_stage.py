"""The layer stage on many architectures: what is converted, how blocks are entered again, and what is left alone.

Public reports of layers replayed by hand: casper-hansen/AutoAWQ#731, #690, #749, #288 and #260,
huggingface/transformers#33497, InternLM/lmdeploy#4158.
"""

import copy

import pytest
import torch
from torch import nn

import hf_lowbit as lb
from hf_lowbit.compression.calls import first
from hf_lowbit.compression.chains import find_chains, record
from hf_lowbit.compression.layer_stage import quantize_layers
from hf_lowbit.nn.targets import find_targets
from tests.quantizers.architectures import BY_ID


CHAINED = [
    "llama",
    "gpt2",
    "opt",
    "bloom",
    "gemma3",
    "bert-masked-lm",
    "t5-gated",
    "bart",
    "whisper",
    "vit",
    "mixtral",
]
CONFIG = lb.LowBitConfig(bits=3, group_size=24)


def targets_of(model, config=CONFIG):
    return [t for t in find_targets(model, config) if t.packed is not None]


def batches_of(row):
    return [dict(row.inputs), dict(row.inputs)]


@pytest.mark.parametrize("row_id", CHAINED)
def test_same_modules_as_round_to_nearest_and_no_traces(row_id):
    row = BY_ID[row_id]
    model = row.build()
    batches = batches_of(row)
    model.train()
    expected = {t.name for t in targets_of(model)}
    random = torch.get_rng_state()
    records = quantize_layers(model, targets_of(model), batches)
    assert {r.name for r in records} == expected
    assert torch.equal(random, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert sum(r.method == "gptq" for r in records) >= len(records) // 3


@pytest.mark.parametrize("row_id", ["llama", "gpt2", "bert-masked-lm", "vit"])
def test_blocks_are_entered_again(row_id):
    row = BY_ID[row_id]
    model = row.build().eval()
    with torch.no_grad():
        chains = find_chains(model)
        assert chains and all(record(model, chain, batches_of(row)) for chain in chains)


@pytest.mark.parametrize("row_id", ["llama", "gpt2", "gemma3", "t5-gated"])
def test_what_is_recorded_of_further_batches_gives_their_outputs(row_id):
    row = BY_ID[row_id]
    model = row.build().eval()
    other = {k: v.flip(-1) for k, v in row.inputs.items()}
    with torch.no_grad():
        for chain in find_chains(model):
            seen = []
            last = chain.blocks[-1][1]
            handle = last.register_forward_hook(lambda m, a, o, seen=seen: seen.append(first(o)))
            model(**other)
            handle.remove()
            recording = record(model, chain, [dict(row.inputs), other])[1]
            hidden = recording.hidden
            for index, (_, block) in enumerate(chain.blocks):
                hidden = recording.enter(index, block, hidden)
            torch.testing.assert_close(hidden, seen[0])


@pytest.mark.parametrize("row_id", ["llama", "gpt2", "bert-masked-lm"])
def test_outputs_are_nearer_to_the_dense_model_than_rounding(row_id):
    row = BY_ID[row_id]
    dense = row.build().eval()
    batches = batches_of(row)
    rounded, solved = copy.deepcopy(dense), copy.deepcopy(dense)
    lb.quantize(rounded, CONFIG)
    quantize_layers(solved, targets_of(solved), batches)

    with torch.no_grad():
        expected = getattr(dense(**row.inputs), row.output)

    def distance(model):
        with torch.no_grad():
            return float((getattr(model(**row.inputs), row.output) - expected).square().sum())

    assert distance(solved) < distance(rounded)


def test_nan_in_the_model_is_refused_by_name():
    row = BY_ID["llama"]
    model = row.build()
    norm = next(m for n, m in model.named_modules() if n.endswith("layers.1.input_layernorm"))
    nn.init.constant_(norm.weight, torch.nan)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn"):
        quantize_layers(model, targets_of(model), batches_of(row))
