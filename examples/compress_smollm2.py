"""Compress SmolLM2-135M to 4 bits and show what that changed: size, perplexity, speed, and a sentence.

    python scripts/fetch_assets.py smollm2        # once
    python examples/compress_smollm2.py           # a minute on two cores

The lines a user needs are in `compress`; the rest measures. `--model` takes any causal language model's folder.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hf_lowbit as lb


# the repository's root: the measurements are shared with the benchmarks
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decode import compare
from benchmarks.perplexity import novel, paired, perplexity, window_nlls, windows
from benchmarks.record import is_quiet, watch
from scripts.fetch_assets import locate


BASELINE = """\
Baseline: SmolLM2-135M-Instruct, dequantised Q4_1, permuted. The weights come from a 4-bit file, so as shipped they sit
on a 4-bit grid, and a 4-bit method that hits it looks lossless. The copy used here has its channels shuffled: it
computes the same function, but no group of its weights lies on the old grid. The loss below is that of this
compression; what the 4-bit file lost against the original weights before is not in it."""


def compress(source: str, output: str, bits, group_size):
    """Quantize while loading, save, and load what was saved."""
    config = lb.LowBitConfig(bits=bits, group_size=group_size)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(source).save_pretrained(output)
    return model, AutoModelForCausalLM.from_pretrained(output)


def weight_megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


def answer(model, tokenizer, question: str, new_tokens: int) -> str:
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)[0]
    return tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def main(arguments) -> None:
    source = arguments.model or locate("smollm2")
    if source is None:
        raise SystemExit("SmolLM2 is not on this machine yet; run `python scripts/fetch_assets.py smollm2`.")
    print(BASELINE if arguments.model is None else f"Baseline: {source}")
    tokenizer = AutoTokenizer.from_pretrained(source)
    dense = AutoModelForCausalLM.from_pretrained(source)
    print(f"\nCompressing to {arguments.bits} bits, groups of {arguments.group_size}", flush=True)
    fresh, lowbit = compress(source, arguments.output, arguments.bits, arguments.group_size)
    print(lb.report(lowbit))

    batch = windows(tokenizer, novel("persuasion"), arguments.window, arguments.windows)
    prompt = batch[:1, : min(32, arguments.window)]
    with torch.inference_mode():
        assert torch.equal(fresh(prompt).logits, lowbit(prompt).logits), "the reloaded model is another one"
    del fresh

    scored = arguments.windows * (arguments.window - 1)
    print(f"\nReading {scored:,} tokens with both models", flush=True)
    before, after = (list(window_nlls(model, batch)) for model in (dense, lowbit))
    ratio, low, high = (100 * (value - 1) for value in paired(before, after).ratio)
    with watch() as spent:
        speed = compare(dense, lowbit, prompt, arguments.turns, arguments.steps)
    sizes = [weight_megabytes(Path(folder)) for folder in (source, arguments.output)]

    print(f"\n{'':22}{'before':>10}{'after':>10}")
    print(f"{'weights on disk, MB':22}{sizes[0]:>10.1f}{sizes[1]:>10.1f}   {sizes[0] / sizes[1]:.2f} times smaller")
    print(
        f"{'perplexity':22}{perplexity(before):>10.2f}{perplexity(after):>10.2f}   {ratio:+.1f} % "
        f"(95% interval {low:+.1f} to {high:+.1f}, paired)"
    )
    print(
        f"{'decode, tokens/s':22}{speed.before:>10.1f}{speed.after:>10.1f}   {speed.ratio:.2f} times as fast "
        f"({speed.slowest:.2f} to {speed.fastest:.2f} over {arguments.turns} turns)"
    )
    print(
        f"\nPerplexity: Persuasion by Jane Austen, {arguments.windows} windows of {arguments.window} tokens from the "
        f"start, {scored:,} tokens scored, {str(dense.dtype).removeprefix('torch.')}.\n"
        f"Decode: generate, greedy, batch 1, {torch.get_num_threads()} threads, both models in turns."
    )
    if not is_quiet(spent.others):
        print(f"Other programs used {spent.others:.1f} cores meanwhile: take the speed as a hint.")

    question = "What is the capital of France? One sentence."
    print(f"\n> {question}\n{answer(lowbit, tokenizer, question, arguments.new_tokens)}")
    print(f"\nCheckpoint: {Path(arguments.output).resolve()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or Hub id; SmolLM2-135M as fetched when left out")
    parser.add_argument("--output", default="outputs/smollm2-135m-4bit")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--window", type=int, default=1024, help="tokens in a window")
    parser.add_argument("--windows", type=int, default=17)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="timed tokens a turn")
    parser.add_argument("--new-tokens", type=int, default=24)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main(parser.parse_args())
