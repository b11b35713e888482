"""Plain `model.push_to_hub` and `save_pretrained(push_to_hub=True)` bring a card too; other models are left alone."""

import pytest
from huggingface_hub import ModelCard
from transformers import LlamaForCausalLM
from transformers.utils.hub import PushToHubMixin

import hf_lowbit as lb
from hf_lowbit.hub import install


def test_model_push_to_hub_uploads_our_card(hub, lowbit):
    lowbit.push_to_hub("me/llama", tags=["mine"], commit_message="Plain")
    card = ModelCard(hub.repo("me/llama").text("README.md"))
    assert "More Information Needed" not in card.text and "stored in 4 bits" in card.text
    assert {"low-bit", "4-bit", "hf_lowbit", "mine"} <= set(card.data.tags)
    assert hub.repo("me/llama").titles()[-1] == "Plain"
    assert 'from_pretrained("me/llama")' in card.text
    assert "secret-base" not in str(card)


def test_save_pretrained_with_push_uploads_our_card(hub, lowbit, tmp_path):
    lowbit.save_pretrained(tmp_path / "out", push_to_hub=True, repo_id="me/llama")
    assert "stored in 4 bits" in hub.repo("me/llama").text("README.md")


def test_a_written_readme_survives_a_plain_push(hub, lowbit):
    hub.add_repo("me/llama", {"README.md": "---\nlicense: mit\n---\n\nMy words.\n"})
    lowbit.push_to_hub("me/llama")
    card = ModelCard(hub.repo("me/llama").text("README.md"))
    assert card.text.strip() == "My words." and card.data.license == "mit" and "4-bit" in card.data.tags


def test_dense_models_and_tokenizers_are_pushed_as_ever(hub, dense_folder, tokenizer):
    LlamaForCausalLM.from_pretrained(dense_folder).push_to_hub("me/dense")
    tokenizer.push_to_hub("me/words")
    for repo_id in ("me/dense", "me/words"):
        assert "hf_lowbit" not in hub.repo(repo_id).text("README.md")


def test_a_dequantized_model_is_dense_again(hub, lowbit):
    lowbit.dequantize().push_to_hub("me/dense")
    assert "hf_lowbit" not in hub.repo("me/dense").text("README.md")


def test_the_adapter_of_a_low_bit_model_gets_no_card_of_the_base(hub, lowbit):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(lowbit, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.push_to_hub("me/adapter")
    files = hub.repo("me/adapter").files()
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    assert "of its parameters stored in" not in hub.repo("me/adapter").text("README.md")
    with pytest.raises(ValueError, match="low-bit"):
        lb.push_to_hub(adapted, "me/adapter")


def test_installing_twice_wraps_once():
    install()
    first = PushToHubMixin._upload_modified_files
    install()
    assert PushToHubMixin._upload_modified_files is first
    assert not hasattr(first.__wrapped__, "hf_lowbit")
