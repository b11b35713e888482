"""The processor tiers that this machine can run."""

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
