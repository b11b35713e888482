"""Another process: with the import hook a checkpoint simply loads, without us it stops and computes no garbage."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_lowbit import Scheme


ROOT = Path(__file__).parents[2]
# -S keeps an installed hook out, so that what is tested is the hook of this tree, or none
START = "import sys, site; sys.path = [*{site}, *sys.path]; "
LOAD = """
import json, torch, transformers
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    name, kind = folder.split("=")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(kind)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[1, 5, 9, 33]])).logits
        result = {"sum": logits.double().sum().item(), "ours": "hf_lowbit.nn" in sys.modules}
    except Exception as error:
        result = {"error": type(error).__name__, "text": str(error)}
    print("RESULT " + json.dumps({"name": name, **result}), flush=True)
"""
VARIANTS = {
    "ternary": ("llama", {"bits": "ternary", "group_size": 32}),
    "2-bit": ("llama", {"bits": 2, "group_size": 32}),
    "3-bit": ("llama", {"bits": 3, "group_size": 32}),
    "4-bit": ("llama", {"bits": 4, "group_size": 32}),
    "8-bit": ("llama", {"bits": 8, "group_size": 32}),
    "8-bit-channel": ("llama", {"bits": 8, "group_size": None}),
    "8-bit-tensor": ("llama", {"bits": 8, "group_size": "tensor"}),
    "conv1d": ("gpt2", {"bits": 8, "group_size": 32}),
    "experts": ("mixtral", {"bits": 8, "group_size": 32}),
    "expert-weights-only": ("mixtral", {"bits": 8, "group_size": 32, "modules_to_not_convert": ["self_attn"]}),
    "table": ("llama-tied", {"modules": {"embed_tokens": Scheme(8, 32)}, "modules_to_not_convert": ["layers"]}),
}


def load_elsewhere(folders, import_path, hook):
    """{name: result} of loading each checkpoint in one new process that never imports hf_lowbit itself."""
    site_packages = [path for path in sys.path if path.endswith("site-packages")]
    code = START.format(site=[*import_path, *site_packages]) + ("import _hf_lowbit_autoload; " if hook else "") + LOAD
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HF_LOWBIT_AUTOLOAD"))}
    result = subprocess.run(
        [sys.executable, "-S", "-c", code, *(f"{name}={folder}" for name, folder in folders.items())],
        env={**env, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line[7:]) for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(folders), result.stdout + result.stderr
    return {line["name"]: line for line in lines}


@pytest.fixture(scope="module")
def folders(lowbit_folder):
    return {name: lowbit_folder(architecture, **fields) for name, (architecture, fields) in VARIANTS.items()}


@pytest.fixture(scope="module")
def with_hook(folders):
    return load_elsewhere(folders, [str(ROOT)], hook=True)


@pytest.fixture(scope="module")
def without_us(folders, tmp_path_factory):
    # an empty folder in place of this tree: hf_lowbit can't be imported, as on a machine that does not have it
    return load_elsewhere(folders, [str(tmp_path_factory.mktemp("empty"))], hook=False)


@pytest.mark.parametrize("name", VARIANTS)
def test_loads_through_the_import_hook(name, folders, with_hook):
    model = AutoModelForCausalLM.from_pretrained(folders[name])
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[1, 5, 9, 33]])).logits
    assert with_hook[name] == {"name": name, "sum": logits.double().sum().item(), "ours": True}


@pytest.mark.parametrize("name", VARIANTS)
def test_stops_where_hf_lowbit_is_absent(name, without_us):
    result = without_us[name]
    assert result.get("error") == "RuntimeError", result
    assert "mismatch" in result["text"]
