"""Refinement of a low-bit model against its dense one: block by block, then as a whole. Each keeps only what helps."""
