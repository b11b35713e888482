"""Deciding what is converted: overrides, refusals that name everything, ties, and patterns that do nothing."""

import warnings

import pytest
import torch
import transformers as hf
from torch import nn

from hf_lowbit import LowBitConfig, Scheme
from hf_lowbit.nn.targets import decide, find_targets
from tests.quantizers.architectures import BY_ID, GPT2


def small():
    """up and down to convert, a table, a router and a norm beside them."""
    model = nn.ModuleDict({"up": nn.Linear(8, 6), "down": nn.Linear(6, 8), "gate": nn.Linear(8, 2)})
    model["table"], model["norm"] = nn.Embedding(5, 8), nn.LayerNorm(8)
    return model


def packed(model, **fields):
    """{name: scheme} of what would be converted."""
    return {t.name: t.packed.scheme for t in find_targets(model, LowBitConfig(**fields)) if t.packed is not None}


def test_defaults():
    assert packed(small()) == {"up": Scheme(), "down": Scheme()}
    reasons = {target.name: target.reason for target in decide(small(), LowBitConfig())}
    assert reasons["up"] == "converted" and reasons["gate"] == "router"
    assert reasons["table"] == "embeddings are converted only when `modules` names them"


@pytest.mark.parametrize(
    ("fields", "schemes"),
    [
        pytest.param({"modules": {"up": Scheme(8)}}, {"up": Scheme(8), "down": Scheme()}, id="one"),
        pytest.param({"modules": {"re:up|down": Scheme(2)}}, {"up": Scheme(2), "down": Scheme(2)}, id="pattern"),
        pytest.param(
            {"modules": {"re:up|down": Scheme(2), "up": Scheme(8)}},
            {"up": Scheme(8), "down": Scheme(2)},
            id="exact-wins",
        ),
        pytest.param({"modules_to_not_convert": ["up"]}, {"down": Scheme()}, id="skipped"),
        pytest.param(
            {"modules_to_not_convert": ["up"], "modules": {"re:.*p": Scheme(8), "down": Scheme(3)}},
            {"down": Scheme(3)},
            id="skipping-wins",
        ),
        pytest.param(
            {"modules": {"gate": Scheme(8), "table": Scheme(4)}},
            {"up": Scheme(), "down": Scheme(), "gate": Scheme(8), "table": Scheme(4)},
            id="asked-for",
        ),
    ],
)
def test_overrides(fields, schemes):
    assert packed(small(), **fields) == schemes


def test_shapes_and_orientation():
    targets = {t.name: t for t in decide(hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), LowBitConfig())}
    fc = targets["transformer.h.0.mlp.c_fc"]
    assert (fc.kind, fc.shape, fc.transposed, fc.parameter_name) == (
        "conv1d", (64, 256), True, "transformer.h.0.mlp.c_fc.weight"
    )  # fmt: skip
    assert (fc.packed.in_features, fc.packed.out_features) == (64, 256)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        pytest.param({"modules": {"upp": Scheme()}}, "upp", id="modules-name"),
        pytest.param({"modules": {"re:layer.*": Scheme()}}, "re:layer.*", id="modules-expression"),
        pytest.param({"modules_to_not_convert": ["mlp.gate"]}, "mlp.gate", id="skip-name"),
        pytest.param({"modules_to_not_convert": ["gat"]}, "gat", id="skip-part-of-a-name"),
    ],
)
def test_a_pattern_that_matches_nothing(fields, pattern):
    with pytest.raises(ValueError, match="matches no module of ModuleDict") as caught:
        decide(small(), LowBitConfig(**fields))
    assert repr(pattern) in str(caught.value) and f"`{next(iter(fields))}`" in str(caught.value)


@pytest.mark.parametrize("pattern", ["up.weight", "re:.*weight$", "re:", "re:part$"])
def test_what_would_keep_nothing_dense_is_an_error(pattern):
    # a name of a parameter, an empty expression, and one that stops before the weights
    model = nn.ModuleDict({"part": small()}) if "part" in pattern else small()
    with pytest.raises(ValueError, match="matches no module of|matches `part` but nothing below it"):
        packed(model, modules_to_not_convert=[pattern])


def test_a_module_that_is_both_asked_for_and_kept():
    with pytest.raises(ValueError, match="both name `up`"):
        packed(small(), modules={"up": Scheme(8)}, modules_to_not_convert=["up"])


def test_a_pattern_that_matches_only_what_has_no_low_bit_form():
    with pytest.raises(ValueError, match="`modules` has 'norm', which matches `norm` but no weight"):
        decide(small(), LowBitConfig(modules={"norm": Scheme()}))
    decide(small(), LowBitConfig(modules_to_not_convert=["norm"]))


def test_a_pattern_that_earlier_ones_leave_nothing_to_warns():
    with pytest.warns(UserWarning, match="`modules` has 're:d.*', but entries before it, such as 're:up|down'"):
        decide(small(), LowBitConfig(modules={"re:up|down": Scheme(2), "re:d.*": Scheme(8)}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decide(small(), LowBitConfig(modules={"re:d.*": Scheme(8), "re:up|down": Scheme(2)}))


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.free = nn.Linear(4, 4), nn.Linear(4, 4)
        self.sparse = nn.Embedding(4, 4, sparse=True)
        self.clipped = nn.Embedding(4, 4, max_norm=1.0)
        self.own = Backwards(4, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x):
        return self.own(self.free(x @ self.read.weight))


class Backwards(nn.Linear):
    def forward(self, x):
        return x @ self.weight


REFUSED = {
    "read": "its weight is read directly by Reads",
    "sparse": "`max_norm` and `sparse` embeddings change their weight while they are used",
    "clipped": "`max_norm` and `sparse` embeddings change their weight while they are used",
    "own": "Backwards has a forward of its own",
    "normed": "its weight is computed by a parametrization",
}


def test_what_cannot_be_converted_stays_dense_with_a_reason():
    reasons = {t.name: t.reason for t in decide(Reads(), LowBitConfig()) if t.packed is None}
    assert reasons == REFUSED


def test_asking_for_what_cannot_be_converted_names_all_of_it():
    with pytest.raises(ValueError, match="`modules` names what can't be converted") as caught:
        decide(Reads(), LowBitConfig(modules=dict.fromkeys([*REFUSED, "free"], Scheme())))
    assert [f"`{name}`: {why}" for name, why in REFUSED.items() if f"`{name}`: {why}" not in str(caught.value)] == []
    assert "`free`" not in str(caught.value)


def test_a_broad_pattern_is_no_demand_for_each():
    assert packed(Reads(), modules={"re:.*": Scheme(8)}) == {"free": Scheme(8)}


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        pytest.param(torch.zeros(4, 4, dtype=torch.int8), "its weight is torch.int8, not a float", id="integers"),
        pytest.param(torch.zeros(4, 0), "its weight is empty", id="empty"),
    ],
)
def test_weights_that_hold_no_floats(weight, reason):
    model = nn.ModuleDict({"odd": nn.Linear(4, 4), "up": nn.Linear(4, 4)})
    model["odd"].weight = nn.Parameter(weight, requires_grad=False)
    assert {t.name: t.reason for t in decide(model, LowBitConfig())}["odd"] == reason


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(nn.Sequential(), "Sequential has no linear, Conv1D, embedding or fused experts", id="empty"),
        pytest.param(nn.Sequential(nn.Conv2d(1, 1, 1)), "has no linear, Conv1D, embedding", id="convolution"),
        pytest.param(
            nn.ModuleDict({"gate": nn.Linear(4, 2)}),
            "nothing of ModuleDict would be converted. `gate`: router",
            id="gate",
        ),
        pytest.param(
            nn.ModuleDict({"table": nn.Embedding(4, 2)}), "`table`: embeddings are converted only", id="table"
        ),
    ],
)
def test_nothing_to_convert(model, message):
    with pytest.raises(ValueError) as caught:
        find_targets(model, LowBitConfig())
    assert message in str(caught.value)
    assert [t for t in decide(model, LowBitConfig()) if t.packed] == []


def test_everything_skipped_says_who_did_it():
    with pytest.raises(ValueError, match=r"`up`: `modules_to_not_convert` names it \('up'\)"):
        find_targets(small(), LowBitConfig(modules_to_not_convert=["up", "down"]))


@pytest.mark.parametrize("asked", ["model.embed_tokens", "lm_head"])
def test_a_tied_table_takes_its_partner_along(asked):
    schemes = packed(BY_ID["llama-tied"].build(), modules={asked: Scheme(8, 32)})
    assert schemes["model.embed_tokens"] == schemes["lm_head"] == Scheme(8, 32)


def test_an_untied_table_does_not():
    schemes = packed(BY_ID["llama"].build(), modules={"model.embed_tokens": Scheme(8, 32)})
    assert schemes["model.embed_tokens"] == Scheme(8, 32) and "lm_head" not in schemes


def test_two_schemes_for_one_tensor():
    modules = {"model.embed_tokens": Scheme(8), "lm_head": Scheme(4)}
    with pytest.raises(ValueError, match="tied as one tensor") as caught:
        decide(BY_ID["llama-tied"].build(), LowBitConfig(modules=modules))
    assert "lm_head" in str(caught.value) and "model.embed_tokens" in str(caught.value)


def test_a_partner_that_must_stay_dense():
    with pytest.raises(ValueError, match="`model.embed_tokens` is tied to `lm_head`, which stays dense"):
        decide(
            BY_ID["llama-tied"].build(),
            LowBitConfig(modules={"model.embed_tokens": Scheme(8)}, modules_to_not_convert=["lm_head"]),
        )


def test_tied_linear_layers_stay_dense_unless_asked_for():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    assert packed(model) == {"c": Scheme()}
    assert packed(model, modules={"a": Scheme(8)}) == {"a": Scheme(8), "b": Scheme(8), "c": Scheme()}
