"""Load any model in low bits, generate, save it, and load what was saved.

    python examples/load_save_reload.py MODEL            # a folder or Hub id of a causal language model

The checkpoint is an ordinary Hugging Face folder: a machine that has hf_lowbit installed loads it with plain
`from_pretrained`, without importing hf_lowbit and without repeating the settings.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lowbit as lb


def main(model: str, output: str, bits: str, group_size: int) -> None:
    config = lb.LowBitConfig(bits=bits if bits == "ternary" else int(bits), group_size=group_size)
    lowbit = AutoModelForCausalLM.from_pretrained(model, quantization_config=config)
    tokenizer = AutoTokenizer.from_pretrained(model)

    inputs = tokenizer("It is a truth universally acknowledged, that", return_tensors="pt")
    tokens = lowbit.generate(inputs["input_ids"], do_sample=False, max_new_tokens=20)
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))

    lowbit.save_pretrained(output)
    tokenizer.save_pretrained(output)
    reloaded = AutoModelForCausalLM.from_pretrained(output)
    with torch.inference_mode():
        equal = torch.equal(reloaded(**inputs).logits, lowbit(**inputs).logits)
    print(f"saved to {output}; logits after reloading are {'bit-equal' if equal else 'DIFFERENT'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--output", default="outputs/lowbit")
    parser.add_argument("--bits", default="4", choices=["ternary", "2", "3", "4", "8"])
    parser.add_argument("--group-size", type=int, default=64)
    main(**vars(parser.parse_args()))
