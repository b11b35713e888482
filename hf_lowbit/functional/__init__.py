"""The math, as pure functions on tensors: grid -> rounding -> packing -> matmul.

Nothing here knows modules, models or files. `linear` declares the operators; the `kernels` package registers faster
implementations of them. Deleting that package changes speed only.
"""
