"""What a process needs once it has a low-bit model: transformers counts, resizes and saves it right."""

from __future__ import annotations

from .accounting import install_accounting
from .parts import install_parts
from .register import WHEN_USED
from .resize import install_resize


def install() -> None:
    """Wrap what of `PreTrainedModel` has to know low-bit layers; calling it again changes nothing."""
    install_accounting()
    install_resize()
    install_parts()
    for step in WHEN_USED:
        step()
