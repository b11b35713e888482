"""Train a LoRA adapter on SmolLM2-135M in 4 bits, save it, load it again, and merge it both ways.

    python scripts/fetch_assets.py smollm2        # once
    python examples/qlora_smollm2.py

`--model` takes any causal language model's folder. The text is Emma by Jane Austen.
"""

import argparse
import sys
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.utils import logging

import hf_lowbit as lb


# the repository's root, for the text and the place of the fetched model
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.perplexity import novel, windows
from scripts.fetch_assets import locate


def main(arguments) -> None:
    source = arguments.model or locate("smollm2")
    if source is None:
        raise SystemExit("SmolLM2 is not on this machine yet; run `python scripts/fetch_assets.py smollm2`.")
    config = lb.LowBitConfig(bits=4, group_size=64)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    model = lb.prepare_model_for_lowbit_training(model)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.print_trainable_parameters()

    batch = windows(AutoTokenizer.from_pretrained(source), novel("emma"), arguments.window, arguments.windows)
    data = [{"input_ids": row, "labels": row} for row in batch]
    settings = TrainingArguments(
        output_dir=arguments.output, max_steps=arguments.steps, per_device_train_batch_size=2, learning_rate=1e-3,
        save_strategy="no", report_to="none", logging_steps=max(1, arguments.steps // 5), use_cpu=True,
    )  # fmt: skip
    Trainer(model=model, args=settings, train_dataset=data).train()
    model.save_pretrained(arguments.output)

    again = AutoPeftModelForCausalLM.from_pretrained(arguments.output, quantization_config=config).eval()
    model.eval()
    with torch.inference_mode():
        before = loss(again, batch)
    with lb.merge_as("requantize") as losses:
        again.merge_adapter(safe_merge=True)
    print(f"\nloss with the adapter beside the codes: {before:.4f}")
    print(f"loss with it put on the 4-bit grid:     {loss(again, batch):.4f}")
    print(f"of the update lost by that, at worst:   {max(entry.of_update for entry in losses):.2f}")
    again.unmerge_adapter()
    assert loss(again, batch) == before, "unmerging brings back the very codes"
    merged = again.merge_and_unload(safe_merge=True)
    print(f"loss with it merged exactly, dense:     {loss(merged, batch):.4f}")


@torch.inference_mode()
def loss(model, batch) -> float:
    return float(sum(model(input_ids=row[None], labels=row[None]).loss for row in batch[:2]) / len(batch[:2]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or Hub id; SmolLM2-135M as fetched when left out")
    parser.add_argument("--output", default="outputs/smollm2-adapter")
    parser.add_argument("--window", type=int, default=256, help="tokens in a window")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main(parser.parse_args())
