"""Tiny random models of several architectures, dense and low-bit, with batches of real text where they read text."""

from dataclasses import dataclass

import torch
import transformers as tf
from torch import nn

import hf_lowbit as lb
from benchmarks.perplexity import novel


VOCABULARY = 128
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}


def letters(count, length, start=0):
    """A novel's letters as [count, length] token ids."""
    text = novel("emma")[5000 + start : 5000 + start + count * length]
    return torch.tensor([min(ord(letter), VOCABULARY - 1) for letter in text]).view(count, length)


def text(start):
    ids = letters(2, 24, start)
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def pair(start):
    return {"input_ids": letters(2, 16, start), "decoder_input_ids": letters(2, 8, start + 500)}


def noise(name, *shape):
    return lambda start: {name: torch.randn(shape, generator=torch.Generator().manual_seed(start))}


def speech(start):
    return {**noise("input_features", 2, 8, 40)(start), "decoder_input_ids": letters(2, 6, start)}


def llama(**settings):
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=VOCABULARY, **settings))


def bert():
    return tf.BertForMaskedLM(tf.BertConfig(**SIZES, vocab_size=VOCABULARY))


def bert_without_head():
    return tf.BertModel(tf.BertConfig(**SIZES, vocab_size=VOCABULARY))


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, vocab_size=VOCABULARY, decoder_start_token_id=0))


def whisper():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
             "max_source_positions": 20}  # fmt: skip
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return tf.WhisperForConditionalGeneration(tf.WhisperConfig(**sizes, **ids, vocab_size=VOCABULARY))


def vit():
    return tf.ViTForImageClassification(tf.ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=3))


def gpt2():
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64))


def mixtral():
    sizes = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return tf.MixtralForCausalLM(tf.MixtralConfig(**sizes, vocab_size=VOCABULARY))


ARCHITECTURES = {
    "llama": (llama, text), "bert": (bert, text), "bert-without-head": (bert_without_head, text), "t5": (t5, pair),
    "whisper": (whisper, speech), "vit": (vit, noise("pixel_values", 2, 3, 16, 16)), "gpt2": (gpt2, text),
    "mixtral": (mixtral, text),
}  # fmt: skip


@dataclass
class Case:
    """A low-bit model, the dense one it was made from, and batches to tune on and to judge by."""

    model: nn.Module
    dense: nn.Module
    batches: list
    held_out: list


def make(name, bits=3, group_size=16, symmetric=None) -> Case:
    build, batch = ARCHITECTURES[name]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build().eval())
        with torch.no_grad():
            for parameter in models[-1].parameters():
                # random models are nearly linear at their tiny initial weights
                if parameter.ndim > 1:
                    parameter.mul_(3)
    model = lb.quantize(models[0], lb.LowBitConfig(bits=bits, group_size=group_size, symmetric=symmetric))
    starts = [100 * k for k in range(4)]
    return Case(model, models[1], [batch(s) for s in starts], [batch(s + 2000) for s in starts[:2]])
