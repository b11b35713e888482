"""The models that these tests read."""

from tests.assets import albert, minilm, smollm2, smollm2_shipped, tiny_llama  # noqa: F401
