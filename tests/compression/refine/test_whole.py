"""The global stage: never worse than its start, and saved as it was judged."""

import pytest
import torch

import hf_lowbit as lb
from hf_lowbit.compression.calls import forward
from hf_lowbit.compression.refine.blocks import refine_blocks
from hf_lowbit.compression.refine.whole import loss, refine_globally
from tests.compression.refine.architectures import Case, llama, make
from tests.compression.refine.test_blocks import outputs, same, state


def distance(case):
    with torch.no_grad():
        losses = [float(loss(forward(case.model, b), forward(case.dense, b), b)) for b in case.held_out]
    return sum(losses) / len(losses)


def test_the_model_comes_closer_to_the_dense_one(case):
    # judged by what it is tuned on: a random model has nothing that carries over to another text
    case.held_out = case.batches
    before = distance(case)
    result = refine_globally(case.model, case.dense, case.batches, case.held_out, steps=12, learning_rate=5e-3)
    assert result.before == before
    assert result.after == distance(case) <= before
    assert result.after == min(value for _, value in result.losses)
    assert result.step > 0


def test_what_is_refined_is_what_is_saved(case, tmp_path):
    refine_globally(case.model, case.dense, case.batches, case.held_out, steps=3, learning_rate=5e-3)
    expected = outputs(case.model, case.held_out[0])
    case.model.save_pretrained(tmp_path)
    loaded = type(case.dense).from_pretrained(tmp_path).eval()
    assert torch.equal(outputs(loaded, case.held_out[0]), expected)


def test_nothing_else_changes(case):
    case.model.train()
    before = state(case.dense)
    flags = [[p.requires_grad for p in m.parameters()] for m in (case.model, case.dense)]
    generator = torch.get_rng_state()
    refine_globally(case.model, case.dense, case.batches, case.held_out, steps=2)
    assert same(before, state(case.dense))
    assert flags == [[p.requires_grad for p in m.parameters()] for m in (case.model, case.dense)]
    assert torch.equal(generator, torch.get_rng_state())
    assert all(p.grad is None for m in (case.model, case.dense) for p in m.parameters())
    assert all(m.training for m in case.model.modules())


def test_codes_stay():
    case = make("llama")
    codes = {n: m.codes() for n, m in case.model.named_modules() if hasattr(m, "lowbit")}
    refine_globally(case.model, case.dense, case.batches, case.held_out, steps=4, learning_rate=5e-3)
    assert codes
    assert all(torch.equal(codes[name], case.model.get_submodule(name).codes()) for name in codes)


def test_a_run_that_only_gets_worse_is_undone():
    case = make("llama")
    before = state(case.model)
    result = refine_globally(case.model, case.dense, case.batches, case.held_out, steps=2, learning_rate=30.0)
    assert result.step == 0
    assert result.after == result.before
    assert same(before, state(case.model))


def test_padding_does_not_count():
    case = make("llama")
    batch = case.batches[0]
    assert bool((batch["attention_mask"] == 0).any())
    with torch.no_grad():
        output, wanted = forward(case.model, batch), forward(case.dense, batch)
        expected = loss(output, wanted, batch)
        output.logits[batch["attention_mask"] == 0] += 100 * torch.randn(output.logits.shape[-1])
    assert torch.equal(loss(output, wanted, batch), expected)


def test_a_dense_model_is_refused():
    case = make("llama")
    with pytest.raises(ValueError, match="nothing in it is low-bit"):
        refine_globally(case.dense, case.dense, case.batches, case.held_out)


def test_a_low_bit_table_that_is_tied_to_the_head_is_tuned_once():
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(llama(tie_word_embeddings=True).eval())
    model = lb.quantize(models[0], lb.LowBitConfig(modules={"re:.*": lb.Scheme(3, 16, None, "float")}))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    case = Case(model, models[1], make("llama").batches, make("llama").batches)
    result = refine_globally(case.model, case.dense, case.batches, case.held_out, steps=8, learning_rate=5e-3)
    assert result.after == distance(case) < result.before
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_model_in_training_is_refused():
    case = make("llama")
    model = lb.quantize(case.dense, lb.DQTConfig(bits=8))
    with pytest.raises(ValueError, match="is a trainable weight"):
        refine_globally(model, make("llama").dense, case.batches, case.held_out)


def test_smollm2_gains_from_both_stages(smollm2):
    """Two blocks of the real model, on a calibration novel: held-out error falls a good part."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.perplexity import novel, windows

    def load():
        return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16, num_hidden_layers=2)

    rows = windows(AutoTokenizer.from_pretrained(smollm2), novel("emma")[:40_000], 128, 12)
    batches = [{"input_ids": part} for part in rows.split(2)]
    model = lb.quantize(load(), lb.LowBitConfig(bits=3, group_size=64, activations="float"))
    case = Case(model, load(), batches[:4], batches[4:])
    before = distance(case)
    blocks = refine_blocks(case.model, case.dense, case.batches, case.held_out, steps=12)
    assert all(result.kept for result in blocks)
    result = refine_globally(case.model, case.dense, case.batches, case.held_out, steps=8)
    assert result.after <= result.before < before
