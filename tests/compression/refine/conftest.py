"""Fixtures of the refinement tests."""

import pytest
from transformers.utils import logging

from tests.assets import smollm2  # noqa: F401
from tests.compression.refine.architectures import ARCHITECTURES, make


@pytest.fixture(params=ARCHITECTURES)
def case(request):
    """A low-bit model of each architecture, its dense model, and batches."""
    return make(request.param)


@pytest.fixture
def warnings_told(caplog):
    """The log as a function, whoever silenced it before."""
    logger, before = logging.get_logger("hf_lowbit.compression.refine.blocks"), logging.get_verbosity()
    logging.set_verbosity_warning()
    logger.addHandler(caplog.handler)
    yield lambda: caplog.text
    logger.removeHandler(caplog.handler)
    logging.set_verbosity(before)
