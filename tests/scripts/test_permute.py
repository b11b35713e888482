"""The channel shuffle keeps the function and removes the old grid."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.perplexity import novel, windows
from scripts.permute import permute


# the same sums in another order: float32 rounding of logits near 20 through 30 layers; 1.2e-4 was seen
LOGITS_TOLERANCE = 1e-3
# float32 rounding of one multiplication and one addition
GRID_TOLERANCE = 1e-6
# rounding Gaussian-like weights to 16 levels between the extremes of 32 of them costs about 8% of their norm
HONEST_ERROR = 0.05


@torch.no_grad()
def rounding_error(weight, levels=16, group=32):
    """Relative error of rounding each group to `levels` values between its minimum and maximum."""
    groups = weight.float().reshape(-1, group)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = (high - low) / (levels - 1)
    rounded = low + step * ((groups - low) / step.clamp_min(1e-12)).round()
    return float((rounded - groups).norm() / groups.norm())


@pytest.fixture(scope="module")
def shipped(smollm2_shipped):
    return AutoModelForCausalLM.from_pretrained(smollm2_shipped)


def linears(model):
    return [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]


def test_shuffle_keeps_the_logits(shipped, smollm2_shipped):
    tokens = windows(AutoTokenizer.from_pretrained(smollm2_shipped), novel("persuasion"), length=64, count=1)
    shuffled = AutoModelForCausalLM.from_pretrained(smollm2_shipped)
    permute(shuffled, seed=1)
    assert not torch.equal(shuffled.model.embed_tokens.weight, shipped.model.embed_tokens.weight)
    with torch.inference_mode():
        difference = shuffled(tokens).logits - shipped(tokens).logits
    assert difference.abs().max() < LOGITS_TOLERANCE


def test_fetched_copy_is_the_shuffled_shipped_one(shipped, smollm2, smollm2_shipped):
    expected = AutoModelForCausalLM.from_pretrained(smollm2_shipped)
    permute(expected, seed=0)
    found = AutoModelForCausalLM.from_pretrained(smollm2).state_dict()
    for name, value in expected.to(torch.bfloat16).state_dict().items():
        assert torch.equal(value, found[name]), name


def test_shipped_weights_sit_on_a_grid_of_sixteen_values(shipped):
    assert max(rounding_error(linear.weight) for linear in linears(shipped)) < GRID_TOLERANCE


def test_shuffled_weights_do_not(smollm2):
    shuffled = AutoModelForCausalLM.from_pretrained(smollm2)
    assert min(rounding_error(linear.weight) for linear in linears(shuffled)) > HONEST_ERROR


def test_shuffle_keeps_a_tiny_model(tiny_llama):
    """Untied, grouped queries, random weights: every branch of the shuffle without a download."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    tokens = torch.arange(32)[None]
    with torch.inference_mode():
        before = model(tokens).logits
        permute(model, seed=3)
        torch.testing.assert_close(model(tokens).logits, before)


def test_layers_with_biases_are_refused(tiny_llama):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, attention_bias=True)
    with pytest.raises(ValueError, match="without biases"):
        permute(model)
