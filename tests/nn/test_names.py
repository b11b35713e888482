"""Matching names: whole dotted parts, anywhere in the path, whatever wraps the model.

Public reports: huggingface/transformers#47990, sgl-project/sglang#23467, vllm-project/vllm#44628 and #48508.
"""

import pytest

from hf_lowbit.nn.names import first_match, matches


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        pytest.param("mlp.gate", "model.layers.0.mlp.gate", id="end"),
        pytest.param("model.layers.0", "model.layers.0.mlp.gate", id="parent"),
        pytest.param("mlp", "model.layers.0.mlp.gate", id="middle"),
        pytest.param("layers.1", "model.layers.1.mlp", id="number"),
        pytest.param("layers.0.mlp", "base_model.model.model.layers.0.mlp", id="wrapped"),
        pytest.param("lm_head", "lm_head", id="whole"),
        pytest.param("gate_up_proj", "mlp.experts.gate_up_proj", id="expert-weight"),
        pytest.param("re:layers\\.[01]\\.mlp", "model.layers.1.mlp.up_proj", id="regular-expression"),
        pytest.param("re:.*_proj", "model.layers.1.self_attn.q_proj", id="regular-end"),
        pytest.param("re:[qk]_proj", "model.layers.1.self_attn.k_proj", id="regular-class"),
        pytest.param("re:layers\\.1", "model.layers.1.mlp", id="regular-number"),
        pytest.param("re:up|down", "mlp.down", id="regular-alternatives"),
        pytest.param("re:(?i)MLP\\.(?:UP|down)", "model.mlp.up", id="regular-flags"),
    ],
)
def test_matches(pattern, name):
    assert matches(pattern, name)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        pytest.param("gate", "model.layers.0.mlp.gate_proj", id="gate-is-not-gate_proj"),
        pytest.param("mlp.gate", "model.layers.0.mlp.gate_proj", id="dotted-gate"),
        pytest.param("up_proj", "model.layers.0.mlp.gate_up_proj", id="up-is-not-gate_up"),
        pytest.param("layers.1", "model.layers.11.mlp", id="one-is-not-eleven"),
        pytest.param("ayers.1", "model.layers.1", id="part-of-a-word"),
        pytest.param("mlp.gate", "mlp_gate", id="a-dot-is-a-dot"),
        pytest.param("model.layers.0.mlp.gate", "model.layers.0.mlp", id="child-is-not-parent"),
        pytest.param("MLP", "model.layers.0.mlp", id="case"),
        pytest.param("*.mlp", "model.layers.0.mlp", id="no-wildcards"),
        pytest.param("re:gate", "mlp.gate_proj", id="regular-gate"),
        pytest.param("re:up_proj", "mlp.gate_up_proj", id="regular-up"),
        pytest.param("re:layers\\.1", "model.layers.11.mlp", id="regular-eleven"),
        pytest.param("re:up|down", "mlp.down_proj", id="regular-alternatives-are-whole"),
        pytest.param("re:", "mlp.down", id="regular-empty"),
    ],
)
def test_does_not_match(pattern, name):
    assert not matches(pattern, name)


@pytest.mark.parametrize("pattern", ["re:(", "re:[a", "re:*"])
def test_a_broken_expression_is_named(pattern):
    with pytest.raises(ValueError, match="is not a regular expression") as caught:
        matches(pattern, "mlp")
    assert repr(pattern) in str(caught.value)


def test_exact_names_come_before_patterns():
    assert first_match(["mlp", "mlp.up"], "mlp.up") == "mlp.up"
    assert first_match(["re:.*", "mlp.up"], "mlp.up") == "mlp.up"


def test_the_first_pattern_wins():
    assert first_match(["re:mlp.*", "mlp"], "mlp.up") == "re:mlp.*"
    assert first_match({"mlp": 1, "re:mlp.*": 2}, "mlp.up") == "mlp"


def test_nothing_matches():
    assert first_match(["attn", "re:attn"], "mlp.up") is None
    assert first_match([], "mlp.up") is None
