"""Libraries that build on transformers take a low-bit model: pipelines, sentence-transformers, lm-eval."""

import json

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForSequenceClassification,
    pipeline,
)

import hf_lowbit as lb
from hf_lowbit.nn.packed import LowBitModule


CONFIG = lb.LowBitConfig(bits=4, group_size=32)
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
BERT = BertConfig(**SIZES, vocab_size=384, max_position_embeddings=128, num_labels=3)
VIT = ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=3)
WAV2VEC2 = Wav2Vec2Config(
    **SIZES, conv_dim=(32, 32), conv_kernel=(10, 3), conv_stride=(5, 2), num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4, num_labels=3, classifier_proj_size=32,
)  # fmt: skip


@pytest.fixture
def tokenizer(tiny_llama):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(5)
    return tokenizer


def lowbit(cls, config):
    torch.manual_seed(0)
    model = lb.quantize(cls(config).eval(), CONFIG)
    assert any(isinstance(module, LowBitModule) for module in model.modules())
    return model


def close(left, right):
    """The same structure, with numbers that differ by rounding in sums."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(close(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(close, left, right))
    return left == right if isinstance(left, str) else np.allclose(left, right, atol=1e-4)


@pytest.mark.parametrize(
    "task, cls, config",
    [
        ("text-classification", BertForSequenceClassification, BERT),
        ("token-classification", BertForTokenClassification, BERT),
        ("fill-mask", BertForMaskedLM, BERT),
        ("feature-extraction", BertModel, BERT),
        ("image-classification", ViTForImageClassification, VIT),
        ("audio-classification", Wav2Vec2ForSequenceClassification, WAV2VEC2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pipelines_answer_as_with_the_dense_numbers(tokenizer, task, cls, config):
    parts, given = {"tokenizer": tokenizer}, "Emma was"
    if task == "fill-mask":
        given += tokenizer.mask_token
    if task == "image-classification":
        image = pytest.importorskip("PIL.Image")
        from transformers import ViTImageProcessor

        parts = {"image_processor": ViTImageProcessor(size={"height": 32, "width": 32})}
        given = image.new("RGB", (32, 32), "red")
    if task == "audio-classification":
        parts, given = {"feature_extractor": Wav2Vec2FeatureExtractor()}, np.sin(np.arange(4000, dtype=np.float32))
    model = lowbit(cls, config)
    answer = pipeline(task, model, device="cpu", **parts)(given)
    assert close(answer, pipeline(task, model.dequantize(), device="cpu", **parts)(given))


def test_text_generation_from_a_folder_and_on_the_fly(tiny_llama, tmp_path):
    made = AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=CONFIG)
    made.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path)
    wishes = {"max_new_tokens": 4, "do_sample": False}
    saved = pipeline("text-generation", str(tmp_path), device="cpu")("Emma", **wishes)
    options = {"quantization_config": CONFIG}
    fresh = pipeline("text-generation", str(tiny_llama), model_kwargs=options, device="cpu")("Emma", **wishes)
    assert saved == fresh and saved[0]["generated_text"].startswith("Emma")


def test_sentence_transformers(minilm, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    sentences = ["A man is eating food.", "A cheetah is running behind its prey."]

    def encode(path, **options):
        model = sentence_transformers.SentenceTransformer(str(path), device="cpu", model_kwargs=options)
        return model, model.encode(sentences, convert_to_tensor=True)

    _, dense = encode(minilm)
    model, found = encode(minilm, quantization_config=lb.LowBitConfig(bits=8, group_size=None))
    assert torch.cosine_similarity(dense, found).min() > 0.999
    model.save_pretrained(str(tmp_path))
    again, reloaded = encode(tmp_path)
    assert torch.equal(reloaded, found)
    assert sum(isinstance(module, LowBitModule) for module in again.modules()) == 37


def test_lm_eval_with_a_local_task(tiny_llama, tokenizer, tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    rows = [{"text": "Emma Woodhouse, handsome, clever, and rich.", "question": "Emma was", "choices": ["rich", "x"]}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in 2 * rows))
    data = {"data_files": str(tmp_path / "data.jsonl")}
    task = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "train"}
    rolling = task | {"task": "local_text", "output_type": "loglikelihood_rolling", "doc_to_text": "",
                      "doc_to_target": "{{text}}", "metric_list": [{"metric": "bits_per_byte"}]}  # fmt: skip
    choice = task | {"task": "local_choice", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
                     "doc_to_choice": "{{choices}}", "doc_to_target": 0,
                     "metric_list": [{"metric": "acc"}]}  # fmt: skip
    for content in (rolling, choice):
        # JSON is YAML
        (tmp_path / f"{content['task']}.yaml").write_text(json.dumps(content))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def score(model):
        reader = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=64)
        found = lm_eval.simple_evaluate(reader, tasks=["local_text", "local_choice"], task_manager=manager)["results"]
        return found["local_text"]["bits_per_byte,none"], found["local_choice"]["acc,none"]

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=CONFIG, dtype=torch.float32)
    bits, accuracy = score(model)
    dense_bits, dense_accuracy = score(model.dequantize())
    assert 0 < bits == pytest.approx(dense_bits, rel=1e-4) and accuracy == dense_accuracy
