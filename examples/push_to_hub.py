"""Compress a model, push it to the Hub with a card made from its facts, and load it from there.

    hf auth login
    python examples/push_to_hub.py MODEL NAME            # NAME, or NAMESPACE/NAME, of a repository of yours

HF_ENDPOINT points the same commands at another Hub. Plain `model.push_to_hub` and `tokenizer.push_to_hub` work too;
`lb.push_to_hub` sends everything in one commit and writes the card and report.json.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lowbit as lb


def main(model: str, name: str, bits: int, group_size: int, private: bool) -> None:
    config = lb.LowBitConfig(bits=bits, group_size=group_size)
    lowbit = AutoModelForCausalLM.from_pretrained(model, quantization_config=config)
    tokenizer = AutoTokenizer.from_pretrained(model)
    commit = lb.push_to_hub(lowbit, name, tokenizer=tokenizer, private=private)
    repository = commit.repo_url.repo_id
    print(f"pushed to {repository}: {commit.commit_url}")

    loaded = AutoModelForCausalLM.from_pretrained(repository)
    print(f"loaded from there:\n{lb.report(loaded)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("name")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--private", action="store_true")
    main(**vars(parser.parse_args()))
