"""The perplexity protocol: windows, scores, and the paired interval."""

import hashlib
import math
import random
import re
import statistics
from types import SimpleNamespace

import pytest
import torch

from benchmarks.perplexity import (
    AUSTEN,
    CALIBRATION,
    EVALUATION,
    novel,
    paired,
    perplexity,
    student_quantile,
    window_nlls,
    windows,
)


def words(text, **_):
    return {"input_ids": [len(word) for word in text.split()]}


class Uniform(torch.nn.Module):
    """Gives every token of a vocabulary the same probability."""

    device = torch.device("cpu")

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary = vocabulary

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, self.vocabulary, dtype=torch.bfloat16))


def test_windows_follow_each_other_and_do_not_overlap():
    batch = windows(words, "a bb ccc dddd eeeee ffffff ggggggg", length=3, count=2)
    assert batch.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_text_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="text has 2 tokens"):
        windows(words, "a bb", length=3, count=1)


def test_uniform_model_has_the_perplexity_of_its_vocabulary():
    # more than one slice of scored tokens, the last one shorter
    nlls = list(window_nlls(Uniform(50), torch.randint(0, 50, (2, 300))))
    assert perplexity(nlls) == pytest.approx(50)


def test_a_broken_model_is_infinitely_perplexed():
    assert perplexity([1e6]) == math.inf


@pytest.mark.parametrize(("degrees", "exact"), [(5, 2.5706), (16, 2.1199), (1000, 1.9623)])
def test_student_quantile(degrees, exact):
    assert student_quantile(degrees) == pytest.approx(exact, rel=3e-3)


def test_interval_covers_the_true_difference_95_times_in_100():
    generator = random.Random(0)
    covered = 0
    for _ in range(2000):
        before = [generator.gauss(4, 1) for _ in range(17)]
        after = [value + generator.gauss(0.2, 0.05) for value in before]
        difference = paired(before, after)
        covered += difference.low <= 0.2 <= difference.high
    # three standard errors of a binomial proportion
    assert covered / 2000 == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / 2000))


def test_ratio_is_the_quotient_of_the_perplexities():
    before, after = [3.0, 3.5], [3.1, 3.7]
    ratio, low, high = paired(before, after).ratio
    assert ratio == pytest.approx(perplexity(after) / perplexity(before))
    assert low < ratio < high
    assert statistics.fmean(after) > statistics.fmean(before)


def test_calibration_is_apart_from_evaluation():
    assert not set(CALIBRATION) & set(EVALUATION)


def test_novels_are_the_ones_that_figures_were_made_with():
    listed = dict(re.findall(r"^\| (\w+)\.txt \|.*\| (\w{64}) \|$", (AUSTEN.parent / "README.md").read_text(), re.M))
    found = {name: hashlib.sha256(novel(name).encode()).hexdigest() for name in (*CALIBRATION, *EVALUATION)}
    assert found == listed
