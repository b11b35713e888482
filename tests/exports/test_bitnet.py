"""BitNet layers of transformers. Reading compiles, so what needs it is slow."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.exports.bitnet import pack_rows
from tests.exports.compare import logits


# 1 / scale, activations and products in bfloat16: three roundings of 2^-9 over two layers of random weights
BFLOAT16 = 0.03
# float32 throughout; only the order of the sums differs
FLOAT32 = 2e-6


def test_rows_are_transformers_own_packing():
    from transformers.integrations.bitnet import pack_weights

    codes = torch.randint(-1, 2, (12, 7), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    # theirs changes its argument
    assert torch.equal(pack_rows(codes), pack_weights(codes.clone()))


def test_the_file_holds_codes_and_the_inverse_scale(make, tmp_path):
    from safetensors.torch import load_file

    model = make(bits="ternary", group_size="tensor")
    result = lb.export(model, tmp_path / "out", "bitnet")
    assert set(result.stored.values()) == {"ternary"} and not result.exact
    tensors = load_file(tmp_path / "out/model.safetensors")
    codes, scale, _ = lb.codes(model.model.layers[1].mlp.up_proj)
    assert torch.equal(tensors["model.layers.1.mlp.up_proj.weight"], pack_rows(codes))
    assert torch.equal(tensors["model.layers.1.mlp.up_proj.weight_scale"], 1 / scale[0])


@pytest.mark.parametrize(
    "wishes, sentence",
    [
        ({"bits": 4, "group_size": 32}, 'quantize with `bits="ternary", group_size="tensor"`'),
        ({"bits": "ternary", "group_size": None}, "one scale a tensor"),
        ({"bits": "ternary", "group_size": "tensor", "activations": "float"}, "its activations are int8 always"),
    ],
    ids=["4-bit", "channels", "float-activations"],
)
def test_refusals(make, tmp_path, wishes, sentence):
    with pytest.raises(ValueError, match=sentence):
        lb.export(make(**wishes), tmp_path / "out", "bitnet")


def test_float_activations_are_not_to_be_had(make, tmp_path):
    with pytest.raises(ValueError, match="BitNet layers always quantize theirs"):
        lb.export(make(bits="ternary", group_size="tensor"), tmp_path / "out", "bitnet", activations="float")


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)], ids=str)
def test_read_by_transformers(make, tmp_path, dtype, tolerance):
    model = make(dtype, bits="ternary", group_size="tensor")
    lb.export(model, tmp_path / "out", "bitnet")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert type(read.model.layers[0].mlp.up_proj).__name__ == "BitLinear"
    expected, found = logits(model), logits(read)
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
