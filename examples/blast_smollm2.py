"""Make the MLPs of SmolLM2-135M block-sparse while it is finetuned on a novel, and save live blocks only.

    python scripts/fetch_assets.py
    python examples/blast_smollm2.py

The checkpoint loads dense; `BlastCallback` removes blocks on a cubic schedule, and packs the model when
training ends. The file then holds live blocks only, and reloads straight into sparse layers. A run as short
as the default's shows how it works; quality takes thousands of steps (docs/sparsity.md).
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
    bits = int(arguments.bits) if arguments.bits in ("8", "4") else arguments.bits
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=lb.BlastConfig(arguments.sparsity, arguments.block_size, bits=bits),
    )
    args = TrainingArguments(
        output_dir=f"{arguments.output}/run", max_steps=arguments.steps, per_device_train_batch_size=4,
        learning_rate=arguments.learning_rate, lr_scheduler_type="cosine", warmup_steps=max(1, arguments.steps // 10),
        use_cpu=True, logging_steps=max(1, arguments.steps // 6), save_strategy="no", report_to="none",
        disable_tqdm=True, bf16=True,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Windows(tokenizer, "emma", arguments.context, 4 * arguments.steps),
        eval_dataset=Windows(tokenizer, "persuasion", arguments.context, arguments.eval_windows),
        callbacks=[lb.BlastCallback(step_size=max(1, arguments.steps // 12))],
    )
    dense_bytes = lb.report(model).total_bytes
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    print(f"held-out loss, nats a token: {before:.3f} before, {after:.3f} after {arguments.steps} steps")
    report = lb.report(model)
    print(report)
    print(f"weights in memory: {dense_bytes / 1e6:.2f} MB before, {report.total_bytes / 1e6:.2f} MB after")
    trainer.save_model(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    again = AutoModelForCausalLM.from_pretrained(arguments.output)
    tokens = trainer.eval_dataset.rows[:2]
    # the Trainer has wrapped the model to compute in bfloat16
    model = trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    with torch.inference_mode():
        assert torch.equal(again.eval()(tokens).logits, model.eval()(tokens).logits), "the file is the model"
    print(f"reloaded into live blocks, logits are bit-equal: {Path(arguments.output).resolve()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or Hub id; SmolLM2-135M as fetched when left out")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--bits", choices=["8", "4", "ternary"], help="of the live blocks; float when left out")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--eval-windows", type=int, default=32)
    parser.add_argument("--output", default="outputs/smollm2-135m-sparse")
    main(parser.parse_args())
