"""One thread for the tests of tiny models: more only wait for each other."""

import pytest
import torch
from transformers.utils import logging


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def warnings_of_transformers():
    """Tests read what is logged; whoever ran before may have made it quiet."""
    logging.set_verbosity_warning()
    logging.enable_propagation()
    yield
    logging.disable_propagation()
