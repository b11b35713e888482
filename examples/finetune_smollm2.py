"""Finetune SmolLM2-135M on a novel with its weights as 8-bit codes, and compare held-out loss before and after.

    python scripts/fetch_assets.py
    python examples/finetune_smollm2.py

`from_pretrained` rounds the checkpoint to 8 bits while loading; training moves the codes. What is saved is resumable
and deployable at once: there is no conversion at the end.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import hf_lowbit as lb


NOVELS = Path(__file__).resolve().parents[1] / "tests" / "data" / "austen"


class Windows(Dataset):
    """Windows of a tokenized text, spread over the whole of it."""

    def __init__(self, tokenizer, name: str, context: int, count: int):
        text = (NOVELS / f"{name}.txt").read_text(encoding="utf-8")
        ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        rows = ids[: len(ids) // context * context].view(-1, context)
        self.rows = rows[:: max(1, len(rows) // count)][:count]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main(arguments) -> None:
    torch.manual_seed(0)
    folder = arguments.model
    if folder is None:
        from scripts.fetch_assets import locate

        folder = locate("smollm2")
        if folder is None:
            raise SystemExit("SmolLM2 is not on this machine: run `python scripts/fetch_assets.py`, or give --model.")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=lb.DQTConfig(bits=8)
    )
    args = TrainingArguments(
        output_dir=f"{arguments.output}/run", max_steps=arguments.steps, per_device_train_batch_size=4,
        learning_rate=arguments.learning_rate, lr_scheduler_type="cosine", warmup_steps=max(1, arguments.steps // 10),
        use_cpu=True, logging_steps=max(1, arguments.steps // 6), save_strategy="no", report_to="none",
        disable_tqdm=True, bf16=True,
    )  # fmt: skip
    callback = lb.DQTCallback(state_bits=8)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Windows(tokenizer, "emma", arguments.context, 4 * arguments.steps),
        eval_dataset=Windows(tokenizer, "persuasion", arguments.context, arguments.eval_windows),
        callbacks=[callback],
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    print(f"held-out loss, nats a token: {before:.3f} before, {after:.3f} after {arguments.steps} steps")
    print(f"codes changed: {callback.changed_codes:,}")
    trainer.save_model(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    again = AutoModelForCausalLM.from_pretrained(arguments.output)
    loaded = Trainer(model=again, args=args, eval_dataset=trainer.eval_dataset).evaluate()["eval_loss"]
    print(f"reloaded: {loaded:.3f}; a checkpoint to deploy or to resume from: {Path(arguments.output).resolve()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or Hub id; SmolLM2-135M as fetched when left out")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--eval-windows", type=int, default=32)
    parser.add_argument("--output", default="outputs/smollm2-135m-austen")
    main(parser.parse_args())
