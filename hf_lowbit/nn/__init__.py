"""Layers: the packed state of a module plus one call into `functional`, and the walk that swaps them into a model."""

from importlib import import_module
from importlib.util import find_spec


# the kernels register themselves; without that folder everything runs on the reference, slower
if find_spec("hf_lowbit.kernels") is not None:
    import_module("hf_lowbit.kernels")
