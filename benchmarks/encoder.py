"""Two tasks for a sentence encoder whose data are in this repository: which novel, and how similar.

Passages are the paragraphs of four novels with at least 30 words, read to 64 tokens; those of a novel's first 60%
train, those of the rest test. Embeddings are mean-pooled and normalised, as the model's authors do.

    novel        which of the four novels a passage is from (chance 25%). A logistic regression is trained on the dense
                 model's embeddings and then kept: a low-bit encoder has to serve the classifier that is already there.
    similarity   Spearman's rank correlation between the cosines of all pairs of test passages under the two models: a
                 search that ranks by cosine sees the ranks. Labels are the dense model's, so dense is 1 by definition.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.perplexity import CALIBRATION, EVALUATION, novel


NOVELS = sorted((*CALIBRATION, *EVALUATION))
WORDS, TOKENS, TRAIN_SHARE = 30, 64, 0.6
TRAIN, TEST = 250, 200  # passages a novel
# a unit vector of 384 entries gives logits that a classifier has to scale up; fixed, not tuned
SHARPNESS, DECAY = 10.0, 1e-3


@dataclass(frozen=True)
class Passages:
    train: list[str]
    train_labels: Tensor
    test: list[str]
    test_labels: Tensor


def passages(train: int = TRAIN, test: int = TEST) -> Passages:
    texts, labels = ([], []), ([], [])
    for label, name in enumerate(NOVELS):
        paragraphs = [text for text in novel(name).split("\n\n") if len(text.split()) >= WORDS]
        cut = int(TRAIN_SHARE * len(paragraphs))
        for part, chosen in enumerate((paragraphs[:cut][:train], paragraphs[cut:][:test])):
            texts[part].extend(chosen)
            labels[part].extend([label] * len(chosen))
    return Passages(texts[0], torch.tensor(labels[0]), texts[1], torch.tensor(labels[1]))


@torch.no_grad()
def embed(model, tokenizer, texts: list[str], batch_size: int = 32) -> Tensor:
    """Mean-pooled unit embeddings [texts, hidden], float32."""
    model.eval()
    # similar lengths together: padding is work too
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    embeddings: list = [None] * len(texts)
    for start in range(0, len(texts), batch_size):
        chosen = order[start : start + batch_size]
        settings = {"padding": True, "truncation": True, "max_length": TOKENS, "return_tensors": "pt"}
        inputs = tokenizer([texts[index] for index in chosen], **settings).to(model.device)
        hidden = model(**inputs).last_hidden_state.float()
        mask = inputs["attention_mask"][..., None]
        pooled = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).cpu()
        for index, row in zip(chosen, pooled, strict=True):
            embeddings[index] = row
    return torch.stack(embeddings)


@dataclass(frozen=True)
class Probe:
    """A logistic regression on embeddings."""

    weight: Tensor
    bias: Tensor

    def correct(self, embeddings: Tensor, labels: Tensor) -> list[float]:
        """1.0 for each passage that is classified right, else 0.0."""
        return ((SHARPNESS * embeddings @ self.weight + self.bias).argmax(1) == labels).float().tolist()


def train_probe(embeddings: Tensor, labels: Tensor, steps: int = 100) -> Probe:
    """Full-batch, from zero, to convergence: no seed is involved."""
    classes = int(labels.max()) + 1
    weight = torch.zeros(embeddings.shape[1], classes, requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = F.cross_entropy(SHARPNESS * embeddings @ weight + bias, labels) + DECAY * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return Probe(weight.detach(), bias.detach())


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's correlation of two lists without ties."""
    ranks = [values.argsort().argsort().double() for values in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def similarity(dense: Tensor, lowbit: Tensor) -> float:
    """How alike two models rank all pairs of passages by cosine."""
    first, second = torch.triu_indices(len(dense), len(dense), offset=1)
    cosines = [(embeddings @ embeddings.T)[first, second] for embeddings in (dense, lowbit)]
    return rank_correlation(*cosines)
