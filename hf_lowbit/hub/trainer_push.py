"""A card for `Trainer.push_to_hub`, which writes a new README over whatever is there at each push.

For a low-bit model the trainer's text is taken for what it knows (settings, results, versions) and becomes a section
of our card; a README that a person wrote, on the Hub or in the output folder, keeps its text. `install` wraps
`Trainer.push_to_hub`, and for the length of one push the trainer's own `create_model_card`, so that trainers with a
card of their own (TRL's) are served too. Dense models and adapters go through untouched.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData

from . import readme


# of a trainer's text, what it measured or was told
PROCEDURE = re.compile(r"^## Training procedure\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
EVALUATION = re.compile(r"^(It achieves the following results on the evaluation set:\n(?:- .*\n)+)", re.MULTILINE)
UNFILLED = "More information needed"
# a trainer's card knows these better than we do; its `base_model` may be a folder that is gone
OF_TRAINER = ("tags", "datasets", "metrics", "eval_results", "model_name", "license", "language", "pipeline_tag")


def install() -> None:
    """Wrap `transformers.Trainer.push_to_hub` once; calling it again changes nothing."""
    from transformers.trainer import Trainer

    push = Trainer.push_to_hub
    if hasattr(push, "hf_lowbit"):
        return

    @functools.wraps(push)
    def push_with_card(self, *args, **kwargs):
        if not _holds_lowbit(self.model):
            return push(self, *args, **kwargs)
        create = self.create_model_card
        token = kwargs.get("token") or self.args.hub_token
        revision = kwargs.get("revision") or getattr(self.args, "hub_revision", None)

        def create_ours(*create_args, **create_kwargs):
            path = Path(self.args.output_dir) / "README.md"
            before = path.read_text(encoding="utf-8-sig") if path.is_file() else None
            create(*create_args, **create_kwargs)
            if self.is_world_process_zero():
                _replace(path, self, before, create_kwargs.get("finetuned_from"), token, revision)

        # the instance hides its class's method until the push is over
        self.create_model_card = create_ours
        try:
            return push(self, *args, **kwargs)
        finally:
            del self.create_model_card

    push_with_card.hf_lowbit = True
    Trainer.push_to_hub = push_with_card


def _holds_lowbit(model) -> bool:
    from .card import is_lowbit

    # of the object itself: a PEFT wrapper answers for its base model, but uploads an adapter
    return "hf_quantizer" in vars(model) and not getattr(model, "_hf_peft_config_loaded", False) and is_lowbit(model)


def _replace(path: Path, trainer, before: str | None, base_model, token, revision) -> None:
    """Put our card, on a text that a person wrote if there is one, in the place of the one the trainer just wrote."""
    from .card import render_card
    from .push import read_readme

    made = path.read_text(encoding="utf-8")
    api = HfApi(token=token, library_name="hf_lowbit")
    on_hub = read_readme(api, trainer.hub_model_id, revision)
    written = [t for t in (on_hub, before) if readme.is_written(t) and not _is_made_by_trainer(t, made)]
    ours = render_card(
        trainer.model, base_model, repo_id=trainer.hub_model_id, token=token, training=_procedure(made, trainer)
    )
    known = vars(ModelCard(made, ignore_metadata_errors=True).data)
    theirs = ModelCardData(**{name: known[name] for name in OF_TRAINER if known.get(name)})
    ours.data = readme.complete(theirs, ours.data)
    readme.merge(written[0] if written else None, ours).save(path)


def _is_made_by_trainer(text: str, made: str) -> bool:
    """Whether `text` is a trainer's own, untouched: it has the sections of `made` and nobody filled them in."""
    text, made = (ModelCard(t, ignore_metadata_errors=True).text for t in (text, made))
    same_sections = re.findall("^#+ .*$", text, re.MULTILINE)[1:] == re.findall("^#+ .*$", made, re.MULTILINE)[1:]
    return text.strip() == made.strip() or (
        same_sections and UNFILLED in made and text.count(UNFILLED) == made.count(UNFILLED)
    )


def _procedure(made: str, trainer) -> str | None:
    """What the trainer's text says about the run, and how many codes it changed."""
    parts = [match[1].strip() for match in (EVALUATION.search(made), PROCEDURE.search(made)) if match]
    rates = [entry["dqt/changed_rate"] for entry in trainer.state.log_history if "dqt/changed_rate" in entry]
    if rates:
        parts.insert(0, f"A step changed {sum(rates) / len(rates):.2%} of the trainable codes, on average.")
    return "\n\n".join(parts) or None
