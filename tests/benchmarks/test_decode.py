"""The decode clock counts real steps of `generate`, as many as asked."""

import torch
from transformers import AutoModelForCausalLM

from benchmarks.decode import Clock, compare, median_step


def test_clock_leaves_out_the_prompt_and_the_first_steps():
    clock = Clock()
    clock.times = [0.0, 10.0, 11.0, 13.0, 14.0]
    assert clock.steps(skip=1) == [2.0, 1.0]


def test_end_of_text_does_not_end_the_measurement(tiny_llama):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    # every token ends the text
    model.generation_config.eos_token_id = list(range(model.config.vocab_size - 1))
    assert median_step(model, torch.tensor([[1, 2, 3]]), steps=4) > 0


def test_a_model_is_compared_with_another_in_turns(tiny_llama, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    other = AutoModelForCausalLM.from_pretrained(tiny_llama)
    order = []
    seconds = {id(model): 0.2, id(other): 0.1}
    monkeypatch.setattr("benchmarks.decode.median_step", lambda m, *_: order.append(id(m)) or seconds[id(m)])
    result = compare(model, other, torch.tensor([[1]]), turns=2)
    assert order == [id(model), id(other)] * 3
    assert (result.before, result.after, result.ratio) == (5.0, 10.0, 2.0)
