"""The callback in TRL's supervised fine-tuning, on a model with a real tokenizer."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lowbit as lb
from benchmarks.perplexity import novel
from tests.assets import tiny_llama  # noqa: F401
from tests.training.runs import different, snapshot


trl = pytest.importorskip("trl")


def test_sft_trainer(tiny_llama, tmp_path):  # noqa: F811
    config = lb.DQTConfig(bits=8, forward_bits="ternary")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=config, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.pad_token, tokenizer.eos_token = tokenizer.decode([0]), tokenizer.decode([1])
    text = novel("emma")[:4000]
    data = Dataset.from_dict({"text": [text[start : start + 200] for start in range(0, 4000, 200)]})
    args = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, learning_rate=3e-3, use_cpu=True,
        bf16=False, report_to="none", disable_tqdm=True, logging_steps=1, max_length=64, packing=True,
        gradient_accumulation_steps=2, save_strategy="no",
    )  # fmt: skip
    before, callback = snapshot(model), lb.DQTCallback(state_bits=8)
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer,
                             callbacks=[callback])  # fmt: skip
    trainer.train()
    assert callback.changed_codes > 0
    assert sum("proj.weight" in name for name in different(before, snapshot(model))) == 14
    assert trainer.state.log_history[0]["dqt/changed_rate"] > 0
