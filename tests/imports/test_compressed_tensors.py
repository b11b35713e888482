"""pack-quantized checkpoints, packed by the compressed-tensors package, come in as that package reads them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from tests.assets import tiny_llama  # noqa: F401
from tests.exports.compare import IDS, dense_weights, logits


pytest.importorskip("compressed_tensors")

SCHEMES = [
    pytest.param(*scheme, id="-".join(map(str, scheme)))
    for scheme in [
        (2, "group", False), (3, "group", True), (3, "channel", False), (4, "group", True), (4, "group", False),
        (4, "channel", True), (4, "tensor", True), (5, "group", False), (8, "group", True), (8, "channel", False),
    ]
]  # fmt: skip
DOWN = "model.layers.0.mlp.down_proj"


def write(folder, model, groups, ignore=("lm_head",)):
    """A checkpoint by the package's own compressor; {name: dense weight as the package decompresses it}.

    `groups` maps the targets of `config_groups` to (bits, strategy, symmetric).
    """
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor as Compressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    tensors, dense, config_groups, chosen = {}, {}, {}, {}
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n not in ignore}
    for number, (target, (bits, strategy, symmetric)) in enumerate(groups.items()):
        size = 32 if strategy == "group" else None
        weights = QuantizationArgs(num_bits=bits, strategy=strategy, symmetric=symmetric, group_size=size)
        config_groups[f"group_{number}"] = {"targets": [target], "weights": weights.model_dump(mode="json")}
        for name in linears:
            # an exact name goes before a class
            if target == name or (target == "Linear" and name not in chosen):
                chosen[name] = QuantizationScheme(targets=[target], weights=weights)
    for name, module in linears.items():
        weight, weights = module.weight.detach(), chosen[name].weights
        rows = weight.reshape(1, -1) if weights.strategy == "tensor" else weight
        blocks = rows.unflatten(1, (-1, 32)) if weights.strategy == "group" else rows.unsqueeze(1)
        levels = (1 << weights.num_bits) - 1
        if weights.symmetric:
            scale = blocks.abs().amax(-1) * 2 / levels
            zero = torch.zeros_like(scale, dtype=torch.int8)
        else:
            low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
            scale = (high - low) / levels
            zero = ((-low / scale).round() - (levels + 1) // 2).to(torch.int8)
        scale = scale.reshape(-1) if weights.strategy == "tensor" else scale
        state = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero}
        packed = Compressor.compress(state, chosen[name])
        tensors |= {f"{name}.{part}": tensor.clone() for part, tensor in packed.items()}
        dense[name] = Compressor.decompress(packed, chosen[name])["weight"]
    tensors |= {n: t.clone() for n, t in model.state_dict().items() if n.rpartition(".")[0] not in linears}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": list(ignore),
                    "quantization_status": "compressed", "config_groups": config_groups}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | {"quantization_config": quantization}))
    return dense


@pytest.fixture
def model(tiny_llama):  # noqa: F811
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("bits, strategy, symmetric", SCHEMES)
def test_numbers_are_the_package_s_own(model, tmp_path, bits, strategy, symmetric):
    dense = write(tmp_path / "source", model, {"Linear": (bits, strategy, symmetric)})
    lb.import_checkpoint(tmp_path / "source", tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    weights = dense_weights(read, torch.bfloat16)
    assert sorted(weights) == sorted(dense) and len(dense) == 14
    assert all(torch.equal(weights[name], dense[name]) for name in dense)
    assert all((lb.codes(read.get_submodule(n))[2] is None) == symmetric for n in dense)


@pytest.mark.parametrize("bits, strategy", [(4, "group"), (8, "channel")], ids=["4-group", "8-channel"])
def test_logits_are_those_of_transformers_with_the_package(model, tmp_path, bits, strategy):
    write(tmp_path / "source", model, {"Linear": (bits, strategy, True)})
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype="auto").eval())
    lb.import_checkpoint(tmp_path / "source", tmp_path / "out")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert torch.equal(logits(ours.dequantize()), theirs)


@pytest.mark.parametrize("target", [DOWN, "re:.*0.mlp.down_proj$"], ids=["name", "pattern"])
def test_a_name_goes_before_a_class(model, tmp_path, target):
    dense = write(tmp_path / "source", model, {DOWN: (8, "channel", True), "Linear": (4, "group", True)})
    config = json.loads((tmp_path / "source/config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    # the class first: the order in the file does not decide
    groups["group_0"]["targets"] = [target]
    config["quantization_config"]["config_groups"] = {"a": groups["group_1"], "b": groups["group_0"]}
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    result = lb.import_checkpoint(tmp_path / "source", tmp_path / "out")
    assert [n for n, s in result.modules.items() if s.bits == 8] == [DOWN]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(dense_weights(read, torch.bfloat16)[DOWN], dense[DOWN])


def test_our_own_export_comes_back(tiny_llama, tmp_path):  # noqa: F811
    config = lb.LowBitConfig(bits=4, group_size=32)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=config, dtype="auto").eval()
    lb.export(model, tmp_path / "export", "compressed-tensors")
    lb.import_checkpoint(tmp_path / "export", tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    for name, module in model.named_modules():
        if hasattr(module, "lowbit"):
            ours, theirs = lb.codes(module), lb.codes(read.get_submodule(name))
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
            assert theirs[1].dtype == torch.bfloat16
    assert torch.equal(logits(read), logits(model))


def test_a_group_without_a_scale_is_zero(model, tmp_path):
    write(tmp_path / "source", model, {"Linear": (4, "group", False)})
    tensors = load_file(tmp_path / "source/model.safetensors")
    tensors[f"{DOWN}.weight_scale"][3, 1] = 0
    save_file(tensors, tmp_path / "source/model.safetensors", metadata={"format": "pt"})
    lb.import_checkpoint(tmp_path / "source", tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    weight = dense_weights(read)[DOWN]
    assert not weight[3, 32:64].any() and weight[3, :32].any() and weight[2, 32:64].any()


def test_shards_and_files_beside_them(model, tiny_llama, tmp_path):  # noqa: F811
    dense = write(tmp_path / "source", model, {"Linear": (4, "group", True)})
    tensors = load_file(tmp_path / "source/model.safetensors")
    (tmp_path / "source/model.safetensors").unlink()
    # a layer's parts may lie in different files
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, tmp_path / "source" / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in halves.items() for name in part}}
    (tmp_path / "source/model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "source/README.md").write_text("---\nlicense: mit\n---\n")
    (tmp_path / "source/tokenizer.json").write_bytes((tiny_llama / "tokenizer.json").read_bytes())
    lb.import_checkpoint(tmp_path / "source", tmp_path / "out")
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["README.md", "config.json", *sorted(halves), "model.safetensors.index.json", "tokenizer.json"]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert all(torch.equal(w, dense[n]) for n, w in dense_weights(read, torch.bfloat16).items())
    assert logits(read, input_ids=IDS).isfinite().all()
