"""The model zoo of the quantizer tests: one tiny random model per architecture, with what is expected of it.

`share` is the smallest share of all parameters that must become low-bit, measured and rounded down. What keeps it from
1 in models this small are tables and output layers (64 words of 64 numbers), convolutions, norms and biases, and the
layers that `dense` names: task heads, layers kept in float32, and those whose weight other code reads.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import transformers as hf
from torch import Tensor


VOCABULARY = 64
PICTURE = 16
IMAGE_TOKEN = 63
# added to every vector, so that biases and norms hold numbers of their own
VECTOR_NOISE = 0.02
# usual initial weights (0.02) hardly move the residual stream of a narrow model: errors in a layer would not show
WEIGHT_STD = 0.1
# 8-bit weights, relative to the norm of the dense output: twice what the worst row shows
CLOSE = 0.04
# mixtures: a token near a tie of the router goes to another expert
CLOSE_ROUTED = 0.25

LAYERS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {**LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
DECODER = {**ENCODER, **SPECIAL, "num_key_value_heads": 2}
MIXTURE = {**DECODER, "num_experts_per_tok": 2, "head_dim": 16}
VISION = {**LAYERS, "image_size": PICTURE, "patch_size": 8}
PIPES = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in [("layers", 1), ("attention_heads", 4),
                                                                                ("ffn_dim", 96)]}  # fmt: skip
SEQ2SEQ = {**PIPES, **SPECIAL, "vocab_size": VOCABULARY, "d_model": 64, "decoder_start_token_id": 1}
T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0}  # fmt: skip
WHISPER = {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32,
           "suppress_tokens": None, "begin_suppress_tokens": None}  # fmt: skip
GPT2 = {**SPECIAL, "vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
OPT = {**ENCODER, **SPECIAL, "ffn_dim": 96, "word_embed_proj_dim": 32}
BLOOM = {**SPECIAL, "vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4}
DISTILBERT = {"vocab_size": VOCABULARY, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "num_labels": 3,
              "max_position_embeddings": 32}  # fmt: skip
MAMBA = {**SPECIAL, "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}
MAMBA2 = {**MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 4}
CLIP = {"text_config": {**ENCODER, "eos_token_id": 17}, "vision_config": VISION, "projection_dim": 32}
LLAVA = {"text_config": {**DECODER, "model_type": "llama"}, "image_token_index": IMAGE_TOKEN,
         "vision_config": {**VISION, "model_type": "clip_vision_model"}}  # fmt: skip
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}

IDS = torch.tensor([[1, 5, 9, 33, 7, 21, 60], [1, 40, 3, 12, 55, 8, 17]])
PIXELS = torch.linspace(-1, 1, 2 * 3 * PICTURE * PICTURE).reshape(2, 3, PICTURE, PICTURE)
TEXT = {"input_ids": IDS}
PAIR = {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}
IMAGE = {"pixel_values": PIXELS}
SPEECH = {"input_features": torch.linspace(-1, 1, 2 * 8 * 32).reshape(2, 8, 32), "decoder_input_ids": IDS[:, :4]}
# a picture of 2 x 2 patches stands for four tokens
CAPTION = {"input_ids": torch.tensor([[1] + 4 * [IMAGE_TOKEN] + [5, 9]]), "pixel_values": PIXELS[:1]}

LM, SEQ = hf.AutoModelForCausalLM, hf.AutoModelForSeq2SeqLM
MASKED, CLASSES = hf.AutoModelForMaskedLM, hf.AutoModelForSequenceClassification


@dataclass(frozen=True, repr=False)
class Architecture:
    """One row: how the dense model is made and called, and what of it must become low-bit.

    `dense` holds name patterns (`fnmatch`) of the linear layers that stay dense; all others must be converted.
    `output` is the model output that is compared, `tolerance` how far 8-bit weights may move it.
    """

    id: str
    auto: type
    model: type
    fields: dict
    inputs: dict[str, Tensor]
    share: float
    dense: tuple[str, ...] = ("lm_head",)
    output: str = "logits"
    generates: bool = True
    tolerance: float = CLOSE

    def build(self) -> hf.PreTrainedModel:
        """The dense model, always with the same numbers."""
        torch.manual_seed(0)
        model = self.model(self.model.config_class(**copy.deepcopy(self.fields))).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += VECTOR_NOISE * torch.randn(parameter.shape)
                elif parameter.ndim > 1 and 0 < parameter.std() < WEIGHT_STD:
                    parameter *= WEIGHT_STD / parameter.std()
        return model

    def __repr__(self) -> str:
        return self.id

    def __call__(self, model: hf.PreTrainedModel) -> Tensor:
        """The compared output of `model` on the architecture's inputs."""
        with torch.inference_mode():
            return getattr(model(**self.inputs), self.output)

    def generate(self, model: hf.PreTrainedModel) -> Tensor:
        """Tokens that `model` generates greedily."""
        inputs = {name: value for name, value in self.inputs.items() if not name.startswith("decoder_")}
        return model.generate(**inputs, max_new_tokens=5, do_sample=False)


# fmt: off
ARCHITECTURES = (
    Architecture("llama", LM, hf.LlamaForCausalLM, DECODER, TEXT, 0.87),
    Architecture("llama-tied", LM, hf.LlamaForCausalLM, {**DECODER, "tie_word_embeddings": True}, TEXT, 0.93),
    Architecture("qwen2", LM, hf.Qwen2ForCausalLM, DECODER, TEXT, 0.87),
    Architecture("gemma", LM, hf.GemmaForCausalLM, {**DECODER, "head_dim": 16}, TEXT, 0.93),
    Architecture("gemma3", LM, hf.Gemma3ForCausalLM, {**DECODER, "head_dim": 16}, TEXT, 0.92),
    Architecture("phi3", LM, hf.Phi3ForCausalLM, DECODER, TEXT, 0.87),
    Architecture("gpt2", LM, hf.GPT2LMHeadModel, GPT2, TEXT, 0.92),
    Architecture("opt", LM, hf.OPTForCausalLM, OPT, TEXT, 0.91),
    Architecture("bloom", LM, hf.BloomForCausalLM, BLOOM, TEXT, 0.94),
    Architecture("mixtral", LM, hf.MixtralForCausalLM, {**MIXTURE, "num_local_experts": 4}, TEXT, 0.95,
                 tolerance=CLOSE_ROUTED),
    Architecture("qwen3-moe", LM, hf.Qwen3MoeForCausalLM,
                 {**MIXTURE, "num_experts": 4, "moe_intermediate_size": 32}, TEXT, 0.88, tolerance=CLOSE_ROUTED),
    Architecture("gpt-oss", LM, hf.GptOssForCausalLM, {**MIXTURE, "num_local_experts": 4}, TEXT, 0.93,
                 tolerance=CLOSE_ROUTED),
    Architecture("mamba", LM, hf.MambaForCausalLM, MAMBA, TEXT, 0.85, ("lm_head", "*.dt_proj")),
    Architecture("mamba2", LM, hf.Mamba2ForCausalLM, MAMBA2, TEXT, 0.84),
    Architecture("t5-relu", SEQ, hf.T5ForConditionalGeneration, T5, PAIR, 0.80, ("lm_head", "*.wo")),
    Architecture("t5-gated", SEQ, hf.T5ForConditionalGeneration, {**T5, "feed_forward_proj": "gated-gelu"}, PAIR, 0.83,
                 ("lm_head", "*.wo")),
    Architecture("bart", SEQ, hf.BartForConditionalGeneration, {**SEQ2SEQ, "max_position_embeddings": 32}, PAIR, 0.87),
    Architecture("whisper", hf.AutoModelForSpeechSeq2Seq, hf.WhisperForConditionalGeneration, WHISPER, SPEECH, 0.76,
                 ("proj_out",)),
    Architecture("bert-masked-lm", MASKED, hf.BertForMaskedLM, ENCODER, TEXT, 0.82,
                 ("cls.predictions.transform.dense", "cls.predictions.decoder"), generates=False),
    Architecture("bert-classifier", CLASSES, hf.BertForSequenceClassification, {**ENCODER, "num_labels": 3}, TEXT,
                 0.88, ("classifier",), generates=False),
    Architecture("distilbert", CLASSES, hf.DistilBertForSequenceClassification, DISTILBERT, TEXT, 0.82,
                 ("pre_classifier", "classifier"), generates=False),
    Architecture("vit", hf.AutoModelForImageClassification, hf.ViTForImageClassification,
                 {**VISION, "num_labels": 3}, IMAGE, 0.79, ("classifier",), generates=False),
    Architecture("clip", hf.AutoModel, hf.CLIPModel, CLIP, {**TEXT, **IMAGE}, 0.84, (),
                 output="image_embeds", generates=False),
    Architecture("siglip-vision", hf.AutoModel, hf.SiglipVisionModel, VISION, IMAGE, 0.65,
                 ("*head.attention.out_proj",),
                 output="pooler_output", generates=False),
    Architecture("llava", hf.AutoModelForImageTextToText, hf.LlavaForConditionalGeneration, LLAVA, CAPTION, 0.84),
)
# fmt: on
BY_ID = {architecture.id: architecture for architecture in ARCHITECTURES}
