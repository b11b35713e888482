"""Layers: the packed state of a module plus one call into `functional`, and the walk that swaps them into a model."""
