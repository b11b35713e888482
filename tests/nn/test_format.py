"""The golden checkpoint: its bytes are format version 1, read here by a decoder written from docs/format.md alone."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.nn.packed import LowBitModule
from hf_lowbit.nn.swap import restore_dense
from tests.nn import golden
from tests.nn.golden import ATTENTION, EXPERTS, FOLDER, SCHEMES
from tests.nn.models import by_reference


# the first twelve bytes of every packed weight
FIRST_BYTES = [
    pytest.param(f"{ATTENTION}.q_proj.weight", "64 66 22 22 11 91 99 89 88 44 44 66", id="ternary"),
    pytest.param(f"{ATTENTION}.k_proj.weight", "40 e9 0f a5 3e 54 fa 40", id="2-bits"),
    pytest.param(f"{ATTENTION}.v_proj.weight", "40 e9 aa 0f a5 56 3e 54 ad fa 40 5a", id="3-bits"),
    pytest.param(f"{EXPERTS}.down_proj", "40 e9 0f aa 06 94 fa 10 aa 05 a5 0f", id="3-bits-experts"),
    pytest.param(f"{ATTENTION}.o_proj.weight", "c0 58 e1 7a f3 8c 15 ae 36 cf 58 d1", id="4-bits"),
    pytest.param(f"{EXPERTS}.gate_up_proj", "80 bc f8 35 71 ae ea 27 63 9f dc 18", id="8-bits-experts"),
    pytest.param("model.embed_tokens.weight", "80 bc f8 35 71 ae ea 27 63 9f dc 18", id="8-bits-table"),
]
SHAPES = {
    f"{ATTENTION}.q_proj": ("weight", (8, 8)),
    f"{ATTENTION}.k_proj": ("weight", (4, 8)),
    f"{ATTENTION}.v_proj": ("weight", (4, 8)),
    f"{ATTENTION}.o_proj": ("weight", (8, 8)),
    f"{EXPERTS}.gate_up_proj": ("", (2, 22, 8)),
    f"{EXPERTS}.down_proj": ("", (2, 8, 11)),
    "model.embed_tokens": ("weight", (12, 8)),
}


def fields(stored: np.ndarray, width: int, count: int) -> np.ndarray:
    """`count` bit fields of each row of bytes, least significant bits first."""
    bits = np.unpackbits(stored, axis=-1, bitorder="little")
    bits = bits.reshape(*stored.shape[:-1], -1, width)
    return (bits.astype(int) << np.arange(width)).sum(axis=-1)[..., :count]


def decode(stored: np.ndarray, bits, in_features: int) -> np.ndarray:
    """The table of docs/format.md: byte rows to codes."""
    if bits == 8:
        return stored.view(np.int8).astype(int)
    if bits == 3:
        low = -(-in_features // 4)
        u = fields(stored[..., :low], 2, in_features) + 4 * fields(stored[..., low:], 1, in_features)
    else:
        u = fields(stored, 2 if bits == "ternary" else bits, in_features)
    return u + {"ternary": -1, 2: -2, 3: -4, 4: -8}[bits]


@pytest.fixture(scope="module")
def stored():
    """{name: tensor} of the file."""
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize(("name", "expected"), FIRST_BYTES)
def test_first_bytes(stored, name, expected):
    assert raw(stored[name]).tobytes()[:12].hex(" ") == expected


def test_the_folder_is_small_and_holds_what_the_format_says(stored):
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 8192
    packed = {f"{name}.{parameter}".rstrip(".") for name, (parameter, _) in SHAPES.items()}
    companions = {f"{name}_scale" for name in packed}
    companions |= {
        f"{name}_zero_point"
        for name in packed
        if not SCHEMES[name.removesuffix(".weight")].symmetric
    }  # fmt: skip
    dense = {name for name in stored if name.endswith("norm.weight")} | {"model.layers.0.mlp.gate.weight"}
    assert set(stored) == packed | companions | dense


@pytest.mark.parametrize("name", SCHEMES)
def test_every_number(stored, name):
    """Codes, scales and zero points are those of the formulas the file was made from."""
    scheme, (parameter, shape) = SCHEMES[name], SHAPES[name]
    key = f"{name}.{parameter}".rstrip(".")
    experts, (rows, width) = shape[:-2], shape[-2:]
    weight, scale = stored[key], stored[f"{key}_scale"]
    groups = -(-width // scheme.group_size) if isinstance(scheme.group_size, int) else 1
    scale_shape = (*experts, 1 if scheme.group_size == "tensor" else rows, groups)
    assert weight.dtype == torch.int8 and tuple(weight.shape[:-1]) == (*experts, 1, rows)
    assert scale.dtype == (torch.bfloat16 if isinstance(scheme.group_size, int) else torch.float32)
    assert tuple(scale.shape) == scale_shape
    codes = decode(raw(weight), scheme.bits, width)
    assert np.array_equal(codes, golden.codes(scheme.bits, (*experts, 1, rows, width)).numpy())
    assert torch.equal(scale, golden.scales(scale_shape, scale.dtype))
    zero_point = stored.get(f"{key}_zero_point")
    assert (zero_point is None) is scheme.symmetric
    if zero_point is not None:
        assert torch.equal(zero_point, golden.zero_points(scheme.bits, scale_shape))


def test_every_code_of_every_grid_occurs(stored):
    for name, (parameter, shape) in SHAPES.items():
        if (bits := SCHEMES[name].bits) != 8:
            codes = decode(raw(stored[f"{name}.{parameter}".rstrip(".")]), bits, shape[-1])
            assert len(np.unique(codes)) == {"ternary": 3, 2: 4, 3: 8, 4: 16}[bits]


def test_the_config():
    config = json.loads((FOLDER / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "hf_lowbit" and config["format_version"] == 1
    assert config["modules"][f"{ATTENTION}.o_proj"] == {
        "bits": 4, "group_size": 5, "symmetric": True, "activations": "int8", "shape": [8, 8]
    }  # fmt: skip
    assert {name: tuple(entry["shape"]) for name, entry in config["modules"].items()} == {
        **{name: shape for name, (_, shape) in SHAPES.items()}, "lm_head": (12, 8)
    }  # fmt: skip


def test_it_loads():
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight_scale is model.model.embed_tokens.weight_scale
    layer = model.model.layers[0]
    codes, scale, zero_point = lb.codes(layer.mlp.experts, "gate_up_proj")
    assert torch.equal(codes, golden.codes(8, (2, 1, 22, 8)).squeeze(1))
    weight = scale.float().repeat_interleave(4, -1) * (codes.float() - zero_point.float().repeat_interleave(4, -1))
    assert torch.equal(weight, layer.mlp.experts.dense_weight("gate_up_proj"))
    ids = torch.tensor([[1, 5, 9, 11]])
    expected = by_reference(golden.build(), ids).logits
    assert torch.equal(by_reference(model, ids).logits, expected)
    restore_dense(model.modules(), torch.float32)
    assert not any(isinstance(module, LowBitModule) for module in model.modules())


def test_saving_it_again_gives_the_same_bytes(stored, tmp_path):
    AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        again = {name: file.get_tensor(name) for name in file.keys()}
    assert again.keys() == stored.keys()
    assert all(again[n].dtype == t.dtype and raw(again[n]).tobytes() == raw(t).tobytes() for n, t in stored.items())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (FOLDER, tmp_path)]
    # which writers that are older than the digest left out
    assert configs[1]["quantization_config"].pop("modules_digest")
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
