"""Fixtures of the quantizer tests: saved dense models of the zoo, and their low-bit forms, made once per test run."""

import json

import pytest
import torch
from transformers.utils import logging

import hf_lowbit as lb
from tests.assets import smollm2  # noqa: F401
from tests.quantizers.architectures import BY_ID


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Models this small are slower with more: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def warnings_of_transformers():
    """Tests read what transformers logs; whoever ran before may have made it quiet."""
    logging.set_verbosity_warning()


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory):
    """id of an architecture -> folder of its dense checkpoint."""
    folders = {}

    def folder(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(f"dense-{name}")
            BY_ID[name].build().save_pretrained(folders[name])
        return folders[name]

    return folder


@pytest.fixture(scope="session")
def lowbit_folder(dense_folder, tmp_path_factory):
    """id of an architecture, fields of a LowBitConfig -> folder of the low-bit checkpoint. Not to be written to."""
    folders = {}

    def folder(name, **fields):
        config = lb.LowBitConfig(**fields)
        key = name + json.dumps(config.to_dict())
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(f"low-bit-{name}")
            model = BY_ID[name].auto.from_pretrained(dense_folder(name), quantization_config=config)
            model.save_pretrained(folders[key])
        return folders[key]

    return folder
