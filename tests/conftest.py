"""What every test gets: no network behind transformers' back, and one `device`."""

import os


# read by huggingface_hub when it is imported, so it has to be set before anything imports transformers
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings


# how long an example takes says nothing on a busy machine; a gate that draws new examples at each run tells of old
# faults at random, so it repeats the same ones (HF_LOWBIT_SAME_EXAMPLES), and the runs in between look for new ones
settings.register_profile("hf_lowbit", deadline=None, derandomize=bool(os.environ.get("HF_LOWBIT_SAME_EXAMPLES")))
settings.load_profile("hf_lowbit")


@pytest.fixture(scope="session")
def device():
    """The device tests run on: HF_LOWBIT_DEVICE where it is set, else the CPU."""
    return torch.device(os.environ.get("HF_LOWBIT_DEVICE", "cpu"))
