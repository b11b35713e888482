"""A card for plain `save_pretrained`: README.md beside the weights, so that a folder tells what it holds before it is
uploaded.

`install` wraps `PreTrainedModel.save_pretrained`. Nothing is asked of the Hub: base, licence and languages are those
known on this machine. A README that a person wrote keeps its text (`readme.py`). A save that is a push gets its card
with the push (`plain_push.py`), adapters and models that are not ours get none.
"""

from __future__ import annotations

import functools
import logging


logger = logging.getLogger(__name__)


def install() -> None:
    """Wrap `save_pretrained` of transformers once; calling it again changes nothing."""
    from transformers.modeling_utils import PreTrainedModel

    save = PreTrainedModel.save_pretrained
    if hasattr(save, "hf_lowbit"):
        return

    @functools.wraps(save)
    def save_with_card(self, save_directory, is_main_process=True, *args, **kwargs):
        saved = save(self, save_directory, is_main_process, *args, **kwargs)
        ours = "hf_quantizer" in vars(self) and not getattr(self, "_hf_peft_config_loaded", False)
        if ours and is_main_process and not kwargs.get("push_to_hub"):
            _write_card(self, save_directory)
        return saved

    save_with_card.hf_lowbit = True
    PreTrainedModel.save_pretrained = save_with_card


def _write_card(model, folder) -> None:
    # imported at the first save: registering with transformers has to stay light
    from .card import is_lowbit, write_card_beside

    if not is_lowbit(model):
        return
    try:
        write_card_beside(folder, model, online=False)
    except ValueError as error:
        # the weights are saved; a README with broken metadata is its writer's to repair
        logger.warning(f"no model card was written to `{folder}`: {error}")
