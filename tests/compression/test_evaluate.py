"""Evaluation: what is scored, by which protocol, for every kind of head."""

import math

import pytest
import torch

from benchmarks.perplexity import window_nlls
from hf_lowbit.compression.evaluate import IGNORED, evaluate, mask_tokens, strided_windows
from tests.compression.refine.architectures import VOCABULARY, letters, make, speech


# sums in another order
SAME = 1e-5


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (8, 1), (50, 7), (2, 1)])
def test_each_token_is_scored_once(length, stride):
    tokens = torch.arange(30)
    scored = []
    for batch in strided_windows(tokens, length, stride):
        kept = batch["labels"] != IGNORED
        assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])
        scored += batch["labels"][kept].tolist()
    # independent windows lose the first token of each
    skipped = set(range(0, 30, length)) if stride == length else {0}
    assert scored == [token for token in range(30) if token not in skipped]


@pytest.mark.parametrize(
    ("tokens", "length", "stride", "words"),
    [(1, 8, 8, "1 token"), (0, 8, 8, "0 token"), (9, 1, 1, "`length`=1"), (9, 4, 5, "`stride`=5"),
     (9, 4, 0, "`stride`=0")],
)  # fmt: skip
def test_bad_windows_are_refused(tokens, length, stride, words):
    with pytest.raises(ValueError, match=words):
        strided_windows(torch.arange(tokens), length, stride)


def test_independent_windows_agree_with_the_benchmarks():
    case = make("llama")
    tokens = letters(1, 60).reshape(-1)
    result = evaluate(case.model, strided_windows(tokens, 20))
    assert result.metric == "perplexity"
    assert result.count == 57
    assert result.losses == pytest.approx(list(window_nlls(case.model, tokens.view(3, 20))), rel=SAME)
    assert result.value == pytest.approx(math.exp(result.loss))


def test_the_causal_loss_is_transformers_own():
    case = make("gpt2")
    batch = {**case.batches[0]}
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    with torch.no_grad():
        expected = float(case.dense(**batch, labels=labels).loss)
    assert evaluate(case.dense, [{**batch, "labels": batch["input_ids"]}]).loss == pytest.approx(expected, rel=SAME)


def test_masked_models():
    case = make("bert")
    batches = mask_tokens(case.batches, mask_token_id=3, seed=1)
    again = mask_tokens(case.batches, 3, seed=1)
    assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(batches, again, strict=True))
    assert all(bool((b["labels"][b["attention_mask"] == 0] == IGNORED).all()) for b in batches)
    with torch.no_grad():
        expected = [float(case.dense(**batch).loss) for batch in batches]
    result = evaluate(case.dense, batches)
    assert result.losses == pytest.approx(expected, rel=SAME)
    assert result.count == sum(int((b["labels"] != IGNORED).sum()) for b in batches)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_sequence_to_sequence(name):
    case = make(name)
    source = {"input_ids": letters(2, 16)} if name == "t5" else {"input_features": speech(0)["input_features"]}
    batch = {**source, "labels": letters(2, 7, 300)}
    with torch.no_grad():
        expected = float(case.dense(**batch).loss)
    assert evaluate(case.dense, [batch]).loss == pytest.approx(expected, rel=SAME)


def test_classification():
    case = make("vit")
    batch = {**case.batches[0], "labels": torch.tensor([0, 2])}
    with torch.no_grad():
        expected = float(case.dense(**batch).loss)
    result = evaluate(case.dense, [batch])
    assert (result.metric, result.count) == ("loss", 2)
    assert result.value == pytest.approx(expected)


def test_nothing_changes():
    """Public reports of side effects: NVIDIA/Model-Optimizer#1501, huggingface/optimum-amd#83, Xilinx/brevitas#459."""
    case = make("llama")
    case.model.train()
    generator = torch.get_rng_state()
    evaluate(case.model, strided_windows(letters(1, 20).reshape(-1), 20))
    assert torch.equal(generator, torch.get_rng_state())
    assert all(module.training for module in case.model.modules())


def test_what_cannot_be_scored_is_refused():
    case = make("llama")
    ids = letters(1, 8)
    with pytest.raises(ValueError, match="batch 0 holds no `labels`"):
        evaluate(case.model, [{"input_ids": ids}])
    with pytest.raises(ValueError, match="nothing to score"):
        evaluate(case.model, [])
    with pytest.raises(ValueError, match="nothing to score"):
        evaluate(case.model, [{"input_ids": ids, "labels": torch.full_like(ids, IGNORED)}])
    with pytest.raises(ValueError, match="drew none"):
        mask_tokens([{"input_ids": ids}], VOCABULARY - 1, share=0.0)
