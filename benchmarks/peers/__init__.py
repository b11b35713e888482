"""Other implementations of low-bit products and models, for comparison; each is optional."""
