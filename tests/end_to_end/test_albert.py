"""An ALBERT from a .bin file: twelve layers share one set of weights, which is rounded, counted and saved once."""

import re

import pytest
import torch
from transformers import AutoModelForMaskedLM

import hf_lowbit as lb
from tests.end_to_end.fresh_process import first_output, weight_bytes


# one layer for all twelve, embeddings of 591 symbols, the head
PARAMETERS = 735_567
# of one reaction's symbols, masked one at a time; 8 bits changed none where it was looked at
AGREEMENT = 0.95
REACTION = "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F"
# the symbols of SMILES: bracketed atoms, two-letter elements, then single characters
SYMBOL = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|.")
CLS, SEP, MASK = 12, 13, 14


@pytest.fixture(scope="module")
def masked(albert):
    """The reaction with each of its symbols masked in turn: one row a symbol."""
    vocabulary = {symbol: index for index, symbol in enumerate((albert / "vocab.txt").read_text().split())}
    tokens = torch.tensor([CLS, *(vocabulary[symbol] for symbol in SYMBOL.findall(REACTION)), SEP])
    rows = tokens.repeat(len(tokens) - 2, 1)
    positions = torch.arange(len(rows))
    rows[positions, positions + 1] = MASK
    return rows, tokens[1:-1]


@torch.inference_mode()
def guesses(model, rows):
    positions = torch.arange(len(rows))
    return model.eval()(input_ids=rows).logits[positions, positions + 1].argmax(-1)


@pytest.fixture
def lowbit(albert):
    config = lb.LowBitConfig(bits=8, group_size=64)
    return AutoModelForMaskedLM.from_pretrained(albert, quantization_config=config)


def test_guesses_the_masked_symbols_that_the_dense_model_guesses(albert, lowbit, masked):
    rows, truth = masked
    dense = guesses(AutoModelForMaskedLM.from_pretrained(albert), rows)
    # the dense model knows some chemistry: an agreement on noise would prove nothing
    assert (dense == truth).float().mean() > 0.5
    assert (guesses(lowbit, rows) == dense).float().mean() >= AGREEMENT


def test_shared_layers_are_counted_once(lowbit):
    report = lb.report(lowbit)
    assert report.total_parameters == sum(row.parameters for row in report.modules) == PARAMETERS
    names = [row.name for row in report.modules if row.scheme is not None]
    assert names and all(
        "albert_layer_groups.0.albert_layers.0" in name or "embedding_hidden" in name for name in names
    )


def test_fresh_process_computes_the_same_bits(lowbit, masked, tmp_path):
    lowbit.eval().save_pretrained(tmp_path / "saved")
    assert weight_bytes(tmp_path / "saved") < 4 * PARAMETERS / 2
    inputs = {"input_ids": masked[0][:3]}
    with torch.inference_mode():
        expected = lowbit(**inputs)[0]
    assert torch.equal(first_output("AutoModelForMaskedLM", tmp_path / "saved", inputs, tmp_path), expected)
