"""Cards of block-sparse models name the measured sparsity, from the model and from its files alike."""

import pytest
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.hub import render_card
from tests.quantizers.test_sparse import pruned


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="float"),
        pytest.param({"bits": 8}, id="8-bits"),
        pytest.param({"bits": 4, "rest": {"bits": 8, "group_size": None}}, id="4-bits-and-rest"),
    ],
)
def test_model_and_files_say_the_same(fields, tmp_path):
    model = lb.freeze(pruned(**fields))
    model.save_pretrained(tmp_path)
    card = render_card(model, online=False)
    for found in (card, render_card(tmp_path, online=False)):
        text = str(found)
        assert "75.00% of blocks" in text and "| 8 x 8 " in text and "75% block-sparse" in text
        assert "block-sparse" in found.data.tags
        assert ("What is in low bits" in text) == ("rest" in fields)
        assert ("low-bit" in found.data.tags) == ("rest" in fields)
        live = f"{fields['bits']} bits" if fields else "float"
        row = next(line for line in text.splitlines() if line.startswith("| 8 x 8 "))
        assert f"| {live} " in row
        size = sum(m.bytes for m in lb.report(model).modules if m.sparsity is not None)
        assert f"{size / 1000:.1f} kB" in row or f"{size / 1e6:.1f} MB" in row or f"{size / 1e6:.2f} MB" in row, row


def test_a_plain_push_names_the_sparsity(hub):
    lb.freeze(pruned()).push_to_hub("me/sparse")
    with open(HfApi().hf_hub_download("me/sparse", "README.md")) as file:
        text = file.read()
    assert "75.00% of blocks" in text
    again = AutoModelForCausalLM.from_pretrained("me/sparse")
    assert {m.sparsity for m in lb.report(again).modules} == {None, 0.75}


def test_what_is_still_being_pruned_says_so():
    text = str(render_card(pruned(), online=False))
    assert "75.00% of blocks" in text
