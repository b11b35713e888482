"""Weights that a checkpoint's index names outside of the checkpoint's own folder are not read.

transformers joins the folder and whatever the index says. A folder that was downloaded could so name any file of this
machine, whose numbers the next `save_pretrained` or push would carry away.
"""

from __future__ import annotations

import os

from torch import nn


def check_inside(model: nn.Module, files: list[str] | None) -> None:
    """Raise ValueError naming the files of a local checkpoint that do not lie in its folder.

    Links inside the folder may point anywhere (the Hub's cache is made of them): the person who made them is the
    reader.
    """
    root = getattr(model, "name_or_path", None)
    if not root or not os.path.isdir(root):
        return
    root = os.path.abspath(root)
    outside = [str(file) for file in files or [] if os.path.commonpath([root, os.path.abspath(file)]) != root]
    if outside:
        raise ValueError(
            f"the checkpoint's index names {', '.join(f'`{file}`' for file in outside)}, outside of its folder "
            f"`{root}`: it was tampered with, or made by hand. Put the files into the folder and name them alone."
        )
