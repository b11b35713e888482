"""`compress`: from a model and a budget to a checkpoint, in stages of which each leaves one that can be deployed."""

from .run import Compressed, compress


__all__ = ["Compressed", "compress"]
