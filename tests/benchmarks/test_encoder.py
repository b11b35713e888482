"""The encoder tasks: passages that do not overlap, embeddings that do not depend on the batch, an honest probe."""

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer

from benchmarks.encoder import NOVELS, embed, passages, rank_correlation, similarity, train_probe


# padding adds exact zeros to attention sums in another order
EMBEDDING_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d"]
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("\n".join(words))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertModel(BertConfig(vocab_size=len(words), **sizes)).eval(), BertTokenizer(str(path))


def test_train_and_test_passages_are_apart_and_balanced():
    chosen = passages(train=30, test=20)
    assert not set(chosen.train) & set(chosen.test)
    assert chosen.train_labels.bincount().tolist() == [30] * len(NOVELS)
    assert chosen.test_labels.bincount().tolist() == [20] * len(NOVELS)


def test_embeddings_have_length_one_and_keep_their_order(tiny_bert):
    texts = ["a b c d", "a", "b b", "c d a b c", "d"]
    together = embed(*tiny_bert, texts, batch_size=3)
    alone = torch.cat([embed(*tiny_bert, [text]) for text in texts])
    assert (together - alone).abs().max() < EMBEDDING_TOLERANCE
    assert together.norm(dim=1) == pytest.approx(torch.ones(5).numpy(), abs=1e-6)


def test_probe_separates_what_can_be_separated():
    torch.manual_seed(0)
    labels = torch.arange(4).repeat(25)
    embeddings = torch.nn.functional.normalize(torch.eye(16)[labels] + 0.1 * torch.randn(100, 16), dim=1)
    probe = train_probe(embeddings[:60], labels[:60])
    assert sum(probe.correct(embeddings[60:], labels[60:])) == 40
    assert sum(probe.correct(embeddings[60:], (labels[60:] + 1) % 4)) == 0


def test_rank_correlation():
    values = torch.tensor([0.1, 0.5, 0.2, 0.9])
    assert rank_correlation(values, values**3) == pytest.approx(1)
    assert rank_correlation(values, -values) == pytest.approx(-1)


def test_a_model_is_perfectly_similar_to_itself():
    embeddings = torch.nn.functional.normalize(torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    assert similarity(embeddings, embeddings) == pytest.approx(1)
