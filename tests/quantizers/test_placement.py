"""Device maps, offload to disk and accelerate's dispatch.

Public reports: vllm-project/llm-compressor#1301, huggingface/accelerate#2481 and #3085,
huggingface/optimum-quanto#376.
"""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.nn import packed
from hf_lowbit.nn.packed import LowBitModule
from tests.quantizers.architectures import BY_ID


FIELDS = {"bits": 3, "group_size": 32, "modules": {"embed_tokens": lb.Scheme(8, 32)}}
LLAMA_ON_DISK = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "disk",
                 "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip


@pytest.fixture(scope="module")
def llama(lowbit_folder):
    """(folder of a low-bit Llama with a low-bit table, its logits)"""
    folder = lowbit_folder("llama", **FIELDS)
    return folder, BY_ID["llama"](AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=["cpu", "auto", "dict"])
@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt2"])
def test_device_map(lowbit_folder, dense_folder, architecture, device_map):
    architecture, fields = BY_ID[architecture], {"bits": 3, "group_size": 32}
    folder = lowbit_folder(architecture.id, **fields)
    expected = architecture(AutoModelForCausalLM.from_pretrained(folder))
    read = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map)
    config = lb.LowBitConfig(**fields)
    made = AutoModelForCausalLM.from_pretrained(
        dense_folder(architecture.id), quantization_config=config, device_map=device_map
    )
    assert torch.equal(architecture(read), expected)
    assert torch.equal(architecture(made), expected)


@pytest.mark.parametrize(
    "device_map", [pytest.param(LLAMA_ON_DISK, id="one-layer"), pytest.param({"": "disk"}, id="everything")]
)
@pytest.mark.parametrize("buffers", [False, True], ids=["parameters", "parameters-and-buffers"])
def test_low_bit_weights_on_disk(llama, tmp_path, device_map, buffers):
    folder, expected = llama
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map=device_map, offload_folder=tmp_path / "offload", offload_buffers=buffers
    )
    away = [n for n, p in model.named_parameters() if p.device.type == "meta"]
    assert any(name.endswith("weight_zero_point") for name in away)
    assert torch.equal(BY_ID["llama"](model), expected)
    # the second forward reads everything from disk again
    assert torch.equal(BY_ID["llama"](model), expected)
    assert model.num_parameters() == BY_ID["llama"].build().num_parameters()


def test_codes_of_a_layer_on_disk(llama, tmp_path):
    folder, _ = llama
    layer = "model.layers.0.mlp.up_proj"
    expected = lb.codes(AutoModelForCausalLM.from_pretrained(folder).get_submodule(layer))
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=LLAMA_ON_DISK, offload_folder=tmp_path / "offload")
    module = model.get_submodule(layer)
    assert all(torch.equal(a, b) for a, b in zip(lb.codes(module), expected, strict=True))
    assert module.weight_scale.is_meta
    nowhere = module.to_empty(device="meta")
    del nowhere._hf_hook
    with pytest.raises(ValueError, match="LowBitLinear has no numbers"):
        lb.codes(nowhere)


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_saving_an_offloaded_model(llama, tmp_path):
    folder, expected = llama
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=LLAMA_ON_DISK, offload_folder=tmp_path / "offload")
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(BY_ID["llama"](again), expected)


def test_mixture_on_disk(lowbit_folder, tmp_path):
    folder = lowbit_folder("mixtral", bits=4, group_size=32)
    expected = BY_ID["mixtral"](AutoModelForCausalLM.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "disk"}, offload_folder=tmp_path)
    assert torch.equal(BY_ID["mixtral"](model), expected)


@pytest.mark.parametrize("architecture", ["llama-tied", "gpt2"])
def test_tied_table_on_disk(lowbit_folder, tmp_path, architecture):
    architecture = BY_ID[architecture]
    table = "wte" if architecture.id == "gpt2" else "embed_tokens"
    folder = lowbit_folder(architecture.id, bits=4, group_size=32, modules={table: lb.Scheme(8, 32)})
    expected = architecture(AutoModelForCausalLM.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "disk"}, offload_folder=tmp_path)
    assert torch.equal(architecture(model), expected)


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param({"device_map": LLAMA_ON_DISK}, id="asked-for"),
        pytest.param({"device_map": "auto", "max_memory": {"cpu": 20_000}}, id="computed"),
    ],
)
def test_quantizing_to_disk_is_refused_before_any_work(dense_folder, tmp_path, placement, monkeypatch):
    """The offload index would go on naming the dense tensors of the original file."""
    rounded = []
    monkeypatch.setattr(packed, "round_to_nearest", lambda *args, **kwargs: rounded.append(args))
    with pytest.raises(ValueError, match="disk while they are quantized on the fly.*Quantize and save once"):
        AutoModelForCausalLM.from_pretrained(
            dense_folder("llama"),
            quantization_config=lb.LowBitConfig(group_size=32),
            offload_folder=tmp_path,
            **placement,
        )
    assert rounded == []


def test_computed_map_counts_packed_bytes(dense_folder, lowbit_folder):
    """A budget that holds the low-bit model, and not half the dense one, needs no disk."""
    config = lb.LowBitConfig(bits=2, group_size=None)
    model = AutoModelForCausalLM.from_pretrained(dense_folder("mixtral"), quantization_config=config)
    budget = {"cpu": int(2.5 * model.get_memory_footprint())}
    assert budget["cpu"] < BY_ID["mixtral"].build().get_memory_footprint() / 2
    for folder, fields in ((dense_folder("mixtral"), {"quantization_config": config}),
                           (lowbit_folder("mixtral", bits=2, group_size=None), {})):  # fmt: skip
        placed = AutoModelForCausalLM.from_pretrained(folder, device_map="auto", max_memory=budget, **fields)
        assert {parameter.device.type for parameter in placed.parameters()} == {"cpu"}


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_accelerate_offloads_a_low_bit_model(llama, tmp_path, where):
    folder, expected = llama
    model = AutoModelForCausalLM.from_pretrained(folder)
    if where == "memory":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, offload_dir=tmp_path, execution_device=torch.device("cpu"))
    assert all(p.device.type == "meta" for m in model.modules() if isinstance(m, LowBitModule) for p in m.parameters())
    assert torch.equal(BY_ID["llama"](model), expected)
