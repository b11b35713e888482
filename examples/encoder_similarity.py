"""Encoders too: sentence similarity with all-MiniLM-L6-v2 in low bits, beside the dense model.

python scripts/fetch_assets.py minilm            # once
python examples/encoder_similarity.py --bits 4
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

import hf_lowbit as lb


# the repository's root, for the place of the fetched model
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.fetch_assets import locate


SENTENCES = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "A cheetah is running behind its prey.",
    "Two animals are chasing each other on the grass.",
)


@torch.inference_mode()
def embed(model, tokenizer, sentences) -> torch.Tensor:
    """Mean over the tokens, length one, as the model's authors do."""
    inputs = tokenizer(list(sentences), padding=True, return_tensors="pt")
    hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def main(model: str | None, bits: int, group_size: int, output: str | None) -> None:
    source = model or locate("minilm")
    if source is None:
        raise SystemExit("MiniLM is not on this machine yet; run `python scripts/fetch_assets.py minilm`.")
    tokenizer = AutoTokenizer.from_pretrained(source)
    dense = embed(AutoModel.from_pretrained(source), tokenizer, SENTENCES)
    config = lb.LowBitConfig(bits=bits, group_size=group_size)
    lowbit_model = AutoModel.from_pretrained(source, quantization_config=config)
    lowbit = embed(lowbit_model, tokenizer, SENTENCES)

    print(lb.report(lowbit_model))
    print(f"\nsimilarity to {SENTENCES[0]!r}: dense, {bits} bits")
    for index, sentence in enumerate(SENTENCES[1:], start=1):
        print(f"  {float(dense[0] @ dense[index]):6.3f} {float(lowbit[0] @ lowbit[index]):6.3f}   {sentence}")
    if output is not None:
        lowbit_model.save_pretrained(output)
        tokenizer.save_pretrained(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or Hub id of an encoder; MiniLM as fetched when left out")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--output", help="a folder to save the low-bit model in")
    main(**vars(parser.parse_args()))
