"""How close a compressed sentence encoder stays to the dense one: all-MiniLM-L6-v2 after `lb.compress`.

    python -m benchmarks.compress_encoder [--restart]

    cosine    mean over passages of the cosine between the embeddings of the low-bit and of the dense model, with its
              lowest; passages and embeddings are those of benchmarks/encoder.py, from the parts of the novels that
              calibration doesn't read

Rows N/rtn round to N bits without data, N/gptq by GPTQ on passages of *Emma* and *Sense and Sensibility*; the layer
stage alone, one scale for the largest groups that all weights divide by.

Writes benchmarks/results/compress_encoder.json.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import hf_lowbit as lb
from benchmarks.encoder import NOVELS, TOKENS, embed, passages
from benchmarks.perplexity import CALIBRATION
from benchmarks.record import Record
from scripts.fetch_assets import ASSETS, locate


BITS = (8, 4)
METHODS = ("rtn", "gptq")
# calibration passages, and test passages a novel
ROWS, TEST = 64, 50


@dataclass(frozen=True)
class Data:
    """Batches of calibration, test passages, and their embeddings by the dense model."""

    calibration: list[dict[str, Tensor]]
    test: list[str]
    expected: Tensor


def read(dense, tokenizer, rows: int = ROWS, test: int = TEST) -> Data:
    found = passages(rows, test)
    allowed = [NOVELS.index(name) for name in CALIBRATION]
    texts = [text for text, label in zip(found.train, found.train_labels.tolist(), strict=True) if label in allowed]
    step = max(1, len(texts) // rows)
    batches = [
        dict(tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt")) for text in texts[::step][:rows]
    ]
    return Data(batches, found.test, embed(dense, tokenizer, found.test))


def measure(dense, tokenizer, data: Data, bits: int, method: str) -> dict:
    calibration = data.calibration if method == "gptq" else None
    result = lb.compress(dense, bits=bits, calibration=calibration, stages=("layer",))
    # unit vectors: the product is the cosine
    cosines = (embed(result.model, tokenizer, data.test) * data.expected).sum(-1)
    size = {"bytes": result.report.total_bytes, "average": result.report.bits_per_weight}
    return {"cosine": float(cosines.mean()), "lowest": float(cosines.min()), "passages": len(cosines), **size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true", help="throw the measured rows away")
    arguments = parser.parse_args()
    folder = locate("minilm")
    if folder is None:
        raise SystemExit("minilm is not on this machine; run `python scripts/fetch_assets.py`.")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {"baseline": ASSETS["minilm"].baseline, "rows": ROWS, "test": TEST, "tokens": TOKENS}
    record = Record("compress_encoder", protocol, restart=arguments.restart, timed=False)
    missing = [(bits, method) for bits in BITS for method in METHODS if f"{bits}/{method}" not in record.rows]
    print(f"{len(missing)} of {len(BITS) * len(METHODS)} rows are missing, half a minute each")
    if not missing:
        return
    tokenizer, dense = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        data = read(dense, tokenizer)
    for bits, method in missing:
        record.add(f"{bits}/{method}", measure(dense, tokenizer, data, bits, method))
        print(bits, method, record.rows[f"{bits}/{method}"], flush=True)


if __name__ == "__main__":
    main()
