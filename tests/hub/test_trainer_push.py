"""`Trainer.push_to_hub` of a low-bit model: our card with the run in it, and no README lost."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments

import hf_lowbit as lb
from hf_lowbit.hub.trainer_push import install


@pytest.fixture
def train(hub, dense_folder, tmp_path):
    """train(model=...) -> a Trainer that has run two steps, with the loopback Hub as its destination."""

    def run(model=None, **fields):
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(dense_folder, quantization_config=lb.DQTConfig(bits=8))
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(96, (8, 12))]
        given = {"max_steps": 2, "learning_rate": 3e-3, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
                 "save_strategy": "no", "logging_steps": 1, "hub_model_id": "me/trained"}  # fmt: skip
        args = TrainingArguments(str(tmp_path / "private-run"), **{**given, **fields})
        # a dense model and an adapter are trained by the optimizer of the trainer
        quantizer = vars(model).get("hf_quantizer")
        callbacks = [lb.DQTCallback()] if quantizer is not None else []
        trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks)
        trainer.train()
        trainer.evaluate()
        return trainer

    return run


def test_the_card_is_ours_and_tells_of_the_run(hub, train):
    train().push_to_hub()
    text = hub.repo("me/trained").text("README.md")
    card = ModelCard(text)
    assert "stored in 8 bits" in card.text and 'from_pretrained("me/trained")' in card.text
    assert "- learning_rate: 0.003" in card.text and "- Loss: " in card.text
    assert "of the trainable codes, on average" in card.text
    assert "More information needed" not in card.text
    assert {"low-bit", "8-bit", "hf_lowbit", "generated_from_trainer"} <= set(card.data.tags)
    assert "secret-base" not in text and "private" not in text


def test_pushing_again_renews_it(hub, train):
    trainer = train()
    trainer.push_to_hub()
    trainer.train()
    trainer.push_to_hub()
    text = hub.repo("me/trained").text("README.md")
    assert text.count("## How to load it") == 1 and text.count("## Training\n") == 1


@pytest.mark.parametrize("place", ["hub", "folder"])
def test_a_written_readme_is_kept(hub, train, place):
    written = "---\nlicense: mit\ntags:\n- mine\n---\n\n# My model\n\nWords of mine.\n"
    trainer = train()
    if place == "hub":
        hub.add_repo("me/trained", {"README.md": written})
    else:
        (Path(trainer.args.output_dir) / "README.md").write_text(written)
    trainer.push_to_hub()
    card = ModelCard(hub.repo("me/trained").text("README.md"))
    assert card.text == "\n# My model\n\nWords of mine.\n"
    assert card.data.license == "mit" and {"mine", "8-bit", "hf_lowbit"} <= set(card.data.tags)


def test_a_trainer_s_untouched_readme_is_replaced_and_an_edited_one_kept(hub, train):
    trainer = train()
    trainer.create_model_card()
    made = (Path(trainer.args.output_dir) / "README.md").read_text()
    trainer.push_to_hub()
    assert "stored in 8 bits" in hub.repo("me/trained").text("README.md")
    edited = made.replace("## Model description\n\nMore information needed", "## Model description\n\nIt is mine.")
    assert edited != made
    hub.add_repo("me/trained", {"README.md": edited})
    trainer.push_to_hub()
    assert "It is mine." in hub.repo("me/trained").text("README.md")


def test_what_the_push_is_told_reaches_the_card(hub, train):
    train().push_to_hub(license="apache-2.0", language="en", tags=["extra"], finetuned_from="org/base")
    data = ModelCard(hub.repo("me/trained").text("README.md")).data
    assert data.license == "apache-2.0" and data.language == ["en"] and "extra" in data.tags
    assert data.base_model == "org/base" and data.base_model_relation == "quantized"


def test_a_revision_is_its_own_and_main_stays(hub, train):
    hub.add_repo("me/trained", {"README.md": "Main."})
    trainer = train()
    HfApi().create_branch("me/trained", branch="trial")
    trainer.push_to_hub(revision="trial")
    assert hub.repo("me/trained").text("README.md") == "Main."
    assert "8-bit" in hub.repo("me/trained").text("README.md", "trial")


def test_dense_models_get_transformers_card(hub, train, dense_folder):
    train(LlamaForCausalLM.from_pretrained(dense_folder)).push_to_hub()
    text = hub.repo("me/trained").text("README.md")
    assert "More information needed" in text and "hf_lowbit" not in text


def test_the_adapter_of_a_low_bit_model_gets_no_card_of_the_base(hub, lowbit, train):
    from peft import LoraConfig, get_peft_model

    # the card is peft's and the trainer's, and they name the base: a folder there is refused by the Hub
    lowbit.name_or_path = lowbit.config._name_or_path = "org/base"
    trainer = train(get_peft_model(lowbit, LoraConfig(target_modules=["q_proj"])))
    trainer.push_to_hub()
    assert "of its parameters stored in" not in hub.repo("me/trained").text("README.md")


def test_trl_s_card_becomes_ours_too(hub, dense_folder, tokenizer, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    model = AutoModelForCausalLM.from_pretrained(dense_folder, quantization_config=lb.DQTConfig(bits=8))
    tokenizer.pad_token = tokenizer.eos_token
    args = trl.SFTConfig(str(tmp_path / "sft"), max_steps=1, use_cpu=True, bf16=False, report_to="none",
                         hub_model_id="me/sft", learning_rate=3e-3, save_strategy="no")  # fmt: skip
    rows = Dataset.from_dict({"text": ["the cat sat on the mat"] * 4})
    trainer = trl.SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer, callbacks=[lb.DQTCallback()])
    trainer.train()
    trainer.push_to_hub()
    card = ModelCard(hub.repo("me/sft").text("README.md"))
    assert "stored in 8 bits" in card.text and "trl" in card.data.tags


def test_installing_twice_wraps_once():
    first = Trainer.push_to_hub
    install()
    assert Trainer.push_to_hub is first and not hasattr(first.__wrapped__, "hf_lowbit")
