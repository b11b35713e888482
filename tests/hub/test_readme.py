"""A README that is already there: written text stays, generated text is renewed, metadata is completed."""

import pytest
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.utils.hub import create_and_tag_model_card

from hf_lowbit.hub import readme


def card(text="# ours", **metadata):
    data = ModelCardData(library_name="transformers", **metadata)
    return ModelCard(readme.sign(f"---\n{data.to_yaml()}\n---\n\n{text}\n"))


def result(value, dataset="novels"):
    return EvalResult("text-generation", dataset, dataset, "perplexity", value)


def test_without_a_readme_the_card_is_ours():
    assert readme.merge(None, ours := card()) is ours
    assert not readme.is_written(str(ours))


@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["unix", "windows"])
def test_written_text_stays_and_metadata_is_completed(newline):
    existing = newline.join(["---", "license: mit", "tags:", "- mine", "---", "", "# My words", "", "a | b", ""])
    merged = readme.merge(existing, card(license="apache-2.0", tags=["low-bit"], base_model="org/base"))
    assert merged.text == newline.join(["", "# My words", "", "a | b", ""])
    assert merged.data.license == "mit"
    assert merged.data.tags == ["mine", "low-bit"]
    assert merged.data.base_model == "org/base"
    assert ModelCard(str(merged)).data.to_dict() == merged.data.to_dict()


def test_text_without_any_metadata_stays():
    merged = readme.merge("Just a line.", card(tags=["low-bit"]))
    assert merged.text == "Just a line."
    assert merged.data.tags == ["low-bit"]


def test_our_untouched_text_is_renewed():
    merged = readme.merge(str(card("# 4 bits", tags=["4-bit", "mine"])), card("# 2 bits", tags=["2-bit"]))
    assert "# 2 bits" in merged.text and "# 4 bits" not in merged.text
    assert merged.data.tags == ["mine", "2-bit"]


def test_our_text_becomes_theirs_once_it_is_edited():
    edited = str(card("# 4 bits")).replace("# 4 bits", "# 4 bits, and my remark")
    assert readme.is_written(edited)
    assert "my remark" in readme.merge(edited, card("# 2 bits")).text


def test_the_empty_form_of_transformers_is_replaced(hub):
    hub.add_repo("me/empty")
    form = create_and_tag_model_card("me/empty", tags=["mine"])
    assert "More Information Needed" in str(form)
    merged = readme.merge(str(form), card("# ours", tags=["low-bit"]))
    assert "# ours" in merged.text and "More Information Needed" not in str(merged)
    assert merged.data.tags == ["mine", "low-bit"]


def test_a_result_measured_again_replaces_the_old_one_only():
    old = card(model_name="x", eval_results=[result(20.0), result(5.0, "other")])
    merged = readme.merge(str(old), card(model_name="y", eval_results=[result(21.5)]))
    assert {r.dataset_name: r.metric_value for r in merged.data.eval_results} == {"novels": 21.5, "other": 5.0}


def test_the_base_at_hand_wins_but_a_list_that_has_it_stays():
    assert readme.merge("---\nbase_model: org/old\n---\nx", card(base_model="org/new")).data.base_model == "org/new"
    several = "---\nbase_model:\n- org/new\n- org/other\n---\nx"
    assert readme.merge(several, card(base_model="org/new")).data.base_model == ["org/new", "org/other"]


@pytest.mark.parametrize("block", ["license: [mit", "- just\n- a list", "a: &a [*a"], ids=["syntax", "list", "alias"])
def test_broken_metadata_is_an_error_that_says_where(block):
    with pytest.raises(ValueError, match="metadata block that cannot be read"):
        readme.merge(f"---\n{block}\n---\ntext", card())
