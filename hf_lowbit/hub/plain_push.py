"""A card for plain `model.push_to_hub(...)` and `save_pretrained(..., push_to_hub=True)`.

transformers collects the files of a push in a folder, puts its empty card form or the README of the repository
there, and hands the folder to `PushToHubMixin._upload_modified_files`. That is the one place where a complete
folder and the model meet, on both roads. `install` wraps it: a low-bit model's card is written into the folder
first. Everything else, and every model that is not ours, goes through untouched. Without that method the tags of
`model.add_model_tags` still arrive.
"""

from __future__ import annotations

import functools
import logging


logger = logging.getLogger(__name__)


def install() -> None:
    """Wrap the upload of transformers once; calling it again changes nothing."""
    from transformers.utils.hub import PushToHubMixin

    upload = getattr(PushToHubMixin, "_upload_modified_files", None)
    if upload is None or hasattr(upload, "hf_lowbit"):
        return

    @functools.wraps(upload)
    def upload_with_card(self, working_dir, repo_id, *args, **kwargs):
        # of the object itself: a PEFT wrapper answers for its base model, but uploads an adapter
        if "hf_quantizer" in vars(self) and not getattr(self, "_hf_peft_config_loaded", False):
            _write_card(self, working_dir, repo_id, kwargs.get("token"))
        return upload(self, working_dir, repo_id, *args, **kwargs)

    upload_with_card.hf_lowbit = True
    PushToHubMixin._upload_modified_files = upload_with_card


def _write_card(model, folder, repo_id, token) -> None:
    # imported at the first push: registering with transformers has to stay light
    from .card import is_lowbit, write_card_beside

    if is_lowbit(model):
        write_card_beside(folder, model, repo_id=repo_id, token=token)
