"""What stays dense by default: heads with and without bias, output layers, routers, float32 modules, tied weights.

Public reports of quantized heads: unslothai/unsloth-zoo#161 and #594, NVIDIA/Model-Optimizer#132.
"""

import pytest
import transformers as hf
from torch import nn

from hf_lowbit.nn.rules import default_reasons, find_reason, hard_reasons, tied_groups
from tests.quantizers.architectures import BY_ID, DECODER, DISTILBERT, ENCODER, MIXTURE, T5, VISION


def linear_reasons(model):
    """{name: reason} of the linear layers that stay dense by default."""
    reasons = default_reasons(model)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {name: find_reason(reasons, name) for name in names if find_reason(reasons, name)}


@pytest.mark.parametrize(
    ("model", "config", "heads"),
    [
        pytest.param(hf.BertForSequenceClassification, hf.BertConfig(**ENCODER), {"classifier"}, id="bert-sequence"),
        pytest.param(hf.BertForTokenClassification, hf.BertConfig(**ENCODER), {"classifier"}, id="bert-token"),
        pytest.param(hf.BertForQuestionAnswering, hf.BertConfig(**ENCODER), {"qa_outputs"}, id="bert-answers"),
        pytest.param(hf.BertForMultipleChoice, hf.BertConfig(**ENCODER), {"classifier"}, id="bert-choice"),
        pytest.param(
            hf.BertForNextSentencePrediction, hf.BertConfig(**ENCODER), {"cls.seq_relationship"}, id="bert-next"
        ),
        pytest.param(
            hf.RobertaForSequenceClassification,
            hf.RobertaConfig(**ENCODER),
            {"classifier.dense", "classifier.out_proj"},
            id="roberta-two-layers",
        ),
        pytest.param(
            hf.DistilBertForSequenceClassification,
            hf.DistilBertConfig(**DISTILBERT),
            {"pre_classifier", "classifier"},
            id="distilbert-two-layers",
        ),
        pytest.param(hf.ViTForImageClassification, hf.ViTConfig(**VISION, num_labels=3), {"classifier"}, id="vit"),
        pytest.param(
            hf.LlamaForSequenceClassification, hf.LlamaConfig(**DECODER, num_labels=3), {"score"}, id="llama-no-bias"
        ),
        pytest.param(
            hf.LlamaForTokenClassification, hf.LlamaConfig(**DECODER, num_labels=3), {"score"}, id="llama-token"
        ),
        pytest.param(
            hf.LlamaForQuestionAnswering, hf.LlamaConfig(**DECODER), {"qa_outputs"}, id="llama-base-is-transformer"
        ),
        pytest.param(hf.BertModel, hf.BertConfig(**ENCODER), set(), id="base-model-has-no-head"),
    ],
)
def test_task_heads(model, config, heads):
    assert linear_reasons(model(config)) == dict.fromkeys(heads, "task head")


@pytest.mark.parametrize(
    ("row_id", "heads"),
    [
        pytest.param("llama", {"lm_head"}, id="llama"),
        pytest.param("llama-tied", {"lm_head"}, id="llama-tied"),
        pytest.param("gpt2", {"lm_head"}, id="gpt2"),
        pytest.param("t5-gated", {"lm_head"}, id="t5"),
        pytest.param("whisper", {"proj_out"}, id="whisper"),
        pytest.param("llava", {"lm_head"}, id="llava"),
    ],
)
def test_output_embeddings(row_id, heads):
    assert linear_reasons(BY_ID[row_id].build()) == dict.fromkeys(heads, "output embeddings")


@pytest.mark.parametrize("row_id", ["clip", "llava", "siglip-vision"])
def test_towers_are_no_heads(row_id):
    model = BY_ID[row_id].build()
    kept = linear_reasons(model)
    vision = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".encoder." in f".{n}"]
    assert len(vision) > 8 and not set(kept) & set(vision)


def test_a_gate_with_few_outputs_is_a_router():
    config = hf.Qwen2MoeConfig(**{**MIXTURE, "num_experts": 4, "moe_intermediate_size": 32,
                                  "shared_expert_intermediate_size": 32})  # fmt: skip
    reasons = linear_reasons(hf.Qwen2MoeForCausalLM(config))
    routers = {name for name, reason in reasons.items() if reason == "router"}
    assert routers == {f"model.layers.{layer}.mlp.shared_expert_gate" for layer in range(2)}


def test_the_layer_inside_a_router_is_a_router():
    config = hf.SwitchTransformersConfig(**T5, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)
    model = hf.SwitchTransformersForConditionalGeneration(config)
    routers = {name for name, reason in linear_reasons(model).items() if reason == "router"}
    assert routers and all(name.endswith("mlp.router.classifier") for name in routers)


def test_routers_by_name_and_width():
    model = nn.ModuleDict({"gate": nn.Linear(4, 8), "wide": nn.ModuleDict({"gate": nn.Linear(4, 2048)})})
    model["gate_proj"] = nn.Linear(4, 8)
    assert default_reasons(model) == {"gate": "router"}


@pytest.mark.parametrize("row_id", ["t5-relu", "t5-gated"])
def test_what_the_model_keeps_in_float32_cannot_be_asked_for(row_id):
    model = BY_ID[row_id].build()
    reasons = hard_reasons(model)
    wo = [name for name, module in model.named_modules() if name.endswith(".wo")]
    assert len(wo) == 4
    assert {find_reason(reasons, name) for name in wo} == {"the model keeps it in float32"}
    assert find_reason(reasons, "encoder.block.0.layer.0.SelfAttention.q") is None


def test_a_weight_read_elsewhere_cannot_be_asked_for():
    reasons = hard_reasons(BY_ID["mamba"].build())
    assert reasons["backbone.layers.0.mixer.dt_proj"] == "its weight is read directly by MambaMixer"


@pytest.mark.parametrize(
    ("row_id", "group"),
    [
        pytest.param("llama-tied", {"lm_head.weight", "model.embed_tokens.weight"}, id="llama"),
        pytest.param("gpt2", {"lm_head.weight", "transformer.wte.weight"}, id="gpt2"),
        pytest.param(
            "bart",
            {
                "lm_head.weight",
                *(f"model.{n}.weight" for n in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")),
            },
            id="bart",
        ),
    ],
)
def test_tied_weights_are_groups(row_id, group):
    model = BY_ID[row_id].build()
    assert tied_groups(model) == [group]


def test_untied_models_have_no_groups():
    assert tied_groups(BY_ID["llama"].build()) == []


def test_ties_without_transformers_and_chains():
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abcd"})
    model["b"].weight = model["a"].weight
    assert tied_groups(model) == [{"a.weight", "b.weight"}]
    # declared but not yet one tensor, as on the meta device; the two chains meet
    model.all_tied_weights_keys = {"c.weight": "b.weight"}
    assert tied_groups(model) == [{"a.weight", "b.weight", "c.weight"}]


def test_the_nearest_parent_has_the_reason():
    reasons = {"a": "outer", "a.b": "inner"}
    assert [find_reason(reasons, name) for name in ("a", "a.x", "a.b", "a.b.c", "ab", "x.a")] == [
        "outer", "outer", "inner", "inner", None, None
    ]  # fmt: skip
