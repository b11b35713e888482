"""Solvers: how the codes of one weight are chosen when there is data."""
