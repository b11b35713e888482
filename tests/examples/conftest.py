"""The models that these tests read, and a Hub to push to."""

from tests.assets import albert, minilm, smollm2, smollm2_shipped, tiny_llama  # noqa: F401
from tests.hub_fixture import hub  # noqa: F401
