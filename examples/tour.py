"""The ten-minute tour: compress a model, look at it, chat, share it, train an adapter on it, and load both back.

    python scripts/fetch_assets.py smollm2        # once
    python examples/tour.py                       # pushes to a Hub on this machine that ends with the program
    python examples/tour.py --repo NAME           # pushes to NAME and NAME-adapter of yours (after `hf auth login`)

`--model` takes any causal language model's folder or Hub id. Each step is one function, which is all a program of your
own needs. The text is Emma by Jane Austen.
"""

import argparse
import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory


# the repository's root, for the text, the place of the fetched model, and the Hub of the tests
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@contextmanager
def local_hub():
    """A Hub on this machine. huggingface_hub reads these variables when it is imported, so this comes first."""
    from tests.hub_server import HubServer

    with TemporaryDirectory() as home, HubServer() as server:
        os.environ |= {
            "HF_ENDPOINT": server.endpoint, "HF_TOKEN": server.token, "HF_HOME": home, "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        }  # fmt: skip
        print(f"pushes go to a Hub on this machine, {server.endpoint}")
        yield


def compress(source, output, text):
    """1. From a dense model to a folder that from_pretrained loads."""
    import hf_lowbit as lb

    result = lb.compress(source, output, bits=4, calibration=[text], stages=("layer",), resume=False)
    # 2. what is low-bit, in how many bytes, and which kernel multiplies it
    print(lb.report(result.model))
    return result


def chat(model, tokenizer, question, new_tokens):
    """3. An answer: generate, as with any model."""
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)[0]
    return tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def share(model, repo, tokenizer):
    """4. Weights, tokenizer, a card made of facts, and report.json, in one commit; then load from there."""
    from transformers import AutoModelForCausalLM

    import hf_lowbit as lb

    commit = lb.push_to_hub(model, repo, tokenizer=tokenizer)
    repo = commit.repo_url.repo_id
    print(f"pushed to {commit.repo_url}")
    return repo, AutoModelForCausalLM.from_pretrained(repo)


def train_adapter(model, rows, output, steps):
    """5. LoRA on the low-bit weights, with PEFT and the Trainer."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    import hf_lowbit as lb

    model = lb.prepare_model_for_lowbit_training(model)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    settings = TrainingArguments(
        output_dir=output, max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-3, save_strategy="no",
        report_to="none", logging_steps=max(1, steps // 4), use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model=model, args=settings, train_dataset=data).train()
    return model.eval()


def main(arguments) -> None:
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from benchmarks.perplexity import novel, windows
    from scripts.fetch_assets import locate

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    source = arguments.model or locate("smollm2")
    if source is None:
        raise SystemExit("SmolLM2 is not on this machine yet; run `python scripts/fetch_assets.py smollm2`.")
    tokenizer = AutoTokenizer.from_pretrained(source)
    text = novel("emma")

    print("\n1, 2. Compress to 4 bits, and look at it", flush=True)
    result = compress(source, f"{arguments.output}/model", text[: arguments.calibration])

    print("\n3. Chat", flush=True)
    question = "What is the capital of France? One sentence."
    print(f"> {question}\n{chat(result.model, tokenizer, question, arguments.new_tokens)}")

    print("\n4. Push it, and load it from there", flush=True)
    repo, model = share(result.model, arguments.repo or "tour", tokenizer)

    print("\n5. Train an adapter on what was loaded", flush=True)
    rows = windows(tokenizer, text, arguments.window, 2 * arguments.steps)
    model = train_adapter(model, rows, f"{arguments.output}/run", arguments.steps)

    print("\n6. Push the adapter, and load it with its base", flush=True)
    print(f"pushed to {model.push_to_hub(f'{repo}-adapter').repo_url}")
    again = AutoPeftModelForCausalLM.from_pretrained(f"{repo}-adapter", dtype="auto").eval()
    with torch.inference_mode():
        difference = (again(rows[:1]).logits - model(rows[:1]).logits).abs().max()
    print(f"largest difference of a logit to the model that was trained: {float(difference):.3g}")
    print(f"> {question}\n{chat(again, tokenizer, question, arguments.new_tokens)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or Hub id; SmolLM2-135M as fetched when left out")
    parser.add_argument("--repo", help="a name on the Hub; left out, a Hub on this machine is used")
    parser.add_argument("--output", default="outputs/tour")
    parser.add_argument("--calibration", type=int, default=12_000, help="characters of text to calibrate on")
    parser.add_argument("--window", type=int, default=128, help="tokens in a window")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=24)
    options = parser.parse_args()
    with local_hub() if options.repo is None else nullcontext():
        main(options)
