"""Everything that transformers must know about us: the quantizer, and the cards of a plain `push_to_hub` and of
Trainer's; peft: the adapter layers; and optimum-cli: our commands."""

from __future__ import annotations


def register() -> None:
    """Register with transformers. Calling it again changes nothing; nothing heavy is imported."""
    from .hub import install
    from .hub.saved_card import install as install_saved_card
    from .quantizers import register as register_quantizer
    from .quantizers.register import WHEN_USED

    register_quantizer()
    install()
    # wraps a model class, and those may not be there yet
    if install_saved_card not in WHEN_USED:
        WHEN_USED.append(install_saved_card)


def register_trainer() -> None:
    """Wrap Trainer's push, whose module must have been imported. Calling it again changes nothing."""
    from .hub.trainer_push import install

    install()


def register_peft() -> None:
    """Tell PEFT, which must have been imported, about low-bit layers. Calling it again changes nothing."""
    from .quantizers.peft_hooks import install

    install()


def register_optimum() -> None:
    """Add `lowbit` to optimum-cli, whose module must have been imported. Calling it again changes nothing."""
    from .cli.optimum import install

    install()
