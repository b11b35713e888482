"""The processor tiers that this machine can run, and the conditions of small products."""

import pytest
import torch

from hf_lowbit.kernels.cpu import TIERS, library


@pytest.fixture(params=sorted(TIERS))
def tier(request):
    loaded, needed = library.load(), TIERS[request.param][2]
    if loaded.handle is None or loaded.features & needed != needed:
        pytest.skip(f"{request.param} does not run here: {loaded.reason}")
    torch.manual_seed(0)
    return request.param


@pytest.fixture
def one_thread_and_seed():
    """Products this small are slower with more; inputs are the same in every run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
