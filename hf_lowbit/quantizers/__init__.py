"""Glue to transformers: registration, the quantizer behind `from_pretrained` and `save_pretrained`, and `quantize` in
memory."""

from .register import register


__all__ = ["register"]
