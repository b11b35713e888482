"""Compression, in the order it runs: inspect a model, plan, convert, report."""
