"""The model that these tests read."""

from tests.assets import tiny_llama  # noqa: F401
