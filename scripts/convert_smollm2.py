"""Turn the SmolLM2-135M GGUF file into two ordinary Hugging Face folders.

    python scripts/convert_smollm2.py FOLDER_WITH_THE_FILE OUTPUT

    OUTPUT/shipped     float32: the file's values exactly, still on their 4-bit grid (scripts/permute.py says why
                       that makes it useless as a baseline); kept to show the trap and for exports
    OUTPUT/permuted    bfloat16: the same function with its channels shuffled, in the precision in which the model
                       was published; the baseline of every quality figure, named "dequantised Q4_1, permuted"

Rounding to bfloat16 happens after the shuffle. Both act on single weights, so the order changes no byte; it lets the
shuffle be checked in float32 first. Perplexity in bfloat16 equals float32 to three digits.

A folder appears under its name only when it is complete, and one that exists is left alone.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path


# everything is on disk: a look-up of a hub would only wait for the network
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from permute import permute
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


SEED = 0


def save(model, tokenizer, folder: Path) -> None:
    """Write both under a temporary name, then rename: a reader never sees half a folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        # mkdtemp makes a private folder; a cache may be shared
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:
            # another process may have finished the same work first; its result is as good
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_gguf(gguf: Path):
    """A plain float32 model with the values of the file, and its tokenizer."""
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # transformers marks what it read as quantized and then refuses to save it: move the values to an unmarked model
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model, AutoTokenizer.from_pretrained(**where)


def convert(gguf: Path, output: Path) -> None:
    shipped, permuted = output / "shipped", output / "permuted"
    if not shipped.exists():
        save(*read_gguf(gguf), shipped)
    if not permuted.exists():
        model = AutoModelForCausalLM.from_pretrained(shipped, dtype=torch.float32)
        permute(model, seed=SEED)
        save(model.to(torch.bfloat16), AutoTokenizer.from_pretrained(shipped), permuted)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    (gguf,) = arguments.source.glob("*.gguf")
    convert(gguf, arguments.output)
