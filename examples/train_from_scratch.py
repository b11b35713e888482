"""Train a tiny language model from nothing, on a novel, with weights that are low-bit codes all the while.

    python examples/train_from_scratch.py

8-bit codes with a ternary forward pass: the mode for training from scratch. The Trainer is transformers' own; the
callback moves the codes. At the end `lb.freeze` packs the ternary weights that the forward pass used, and the frozen
model gives the same logits, bit for bit, from a smaller file.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hf_lowbit as lb


NOVELS = Path(__file__).resolve().parents[1] / "tests" / "data" / "austen"


class Windows(Dataset):
    """Windows of a text, byte by byte."""

    def __init__(self, name: str, context: int, limit: int | None = None):
        text = (NOVELS / f"{name}.txt").read_bytes()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.rows = data[: len(data) // context * context].view(-1, context)[:limit]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids = self.rows[index].long()
        return {"input_ids": ids, "labels": ids}


def main(arguments) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=arguments.hidden_size, intermediate_size=8 * arguments.hidden_size // 3,
        num_hidden_layers=arguments.layers, num_attention_heads=4, max_position_embeddings=arguments.context,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = lb.quantize(LlamaForCausalLM(config), lb.DQTConfig(bits=8, forward_bits="ternary"))
    args = TrainingArguments(
        output_dir=f"{arguments.output}/run", max_steps=arguments.steps, per_device_train_batch_size=8,
        learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=arguments.steps // 10, use_cpu=True,
        logging_steps=max(1, arguments.steps // 8), save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Windows("emma", arguments.context),
        eval_dataset=Windows("persuasion", arguments.context, 64),
        callbacks=[lb.DQTCallback(state_bits=8)],
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    trained = trainer.evaluate()["eval_loss"]
    print(f"held-out loss, nats a byte: {before:.3f} before, {trained:.3f} after {arguments.steps} steps")

    trainer.save_model(f"{arguments.output}/trainable")
    tokens = trainer.eval_dataset.rows[:8].long()
    with torch.inference_mode():
        expected = model.eval()(tokens).logits
    lb.freeze(model).save_pretrained(f"{arguments.output}/frozen")
    frozen = AutoModelForCausalLM.from_pretrained(f"{arguments.output}/frozen")
    with torch.inference_mode():
        assert torch.equal(frozen(tokens).logits, expected), "the deployed model is the trained one"
    print("the frozen model, from its file, gives equal logits")
    for name in ("trainable", "frozen"):
        size = Path(arguments.output, name, "model.safetensors").stat().st_size
        print(f"{name + ' checkpoint':22}{size / 1e6:8.3f} MB")
    print(lb.report(frozen))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--hidden-size", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--output", default="outputs/from-scratch")
    main(parser.parse_args())
