"""Block-sparse checkpoints: small, reloaded bit for bit, checked before they are loaded, and back to dense."""

import copy
import json
import pickle
from fnmatch import fnmatch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.functional.block_masks import best_blocks, block_scores
from hf_lowbit.nn.block_sparse import BlockWeight
from hf_lowbit.nn.masked import MaskedModule
from hf_lowbit.nn.sparsify import clear_module, masked_modules, sparse_modules
from tests.quantizers.architectures import BY_ID


def pruned(architecture="llama", **fields):
    """A model whose blocks were pruned by norm, as if by training, and packed."""
    given = {"sparsity": 0.75, "block_size": 8, **fields}
    made = lb.quantize(BY_ID[architecture].build(), lb.BlastConfig(**given))
    for _, module in masked_modules(made):
        scores = block_scores(module.oriented(), module.layout.block)
        count = max(1, round((1 - module.target) * module.layout.pool))
        module.mask = best_blocks(scores, count, module.layout.balance)
        clear_module(module)
    return made


@pytest.mark.parametrize(
    "architecture", ["llama", "gpt2", "bart", "t5-gated", "bert-masked-lm", "llama-tied", "mixtral", "gpt-oss"]
)
@pytest.mark.parametrize("balance", ["row", "none"])
def test_save_and_reload(architecture, balance, tmp_path):
    zoo, made = BY_ID[architecture], pruned(architecture, balance=balance)
    masked = zoo(made)
    lb.freeze(made)
    packed = zoo(made)
    torch.testing.assert_close(packed, masked, atol=1e-4, rtol=1e-4)
    made.save_pretrained(tmp_path)
    again = zoo.auto.from_pretrained(tmp_path)
    assert torch.equal(zoo(again), packed)
    assert {n for n, m in sparse_modules(again) if isinstance(m, BlockWeight)} == {n for n, _ in sparse_modules(made)}
    assert again.config.quantization_config == made.config.quantization_config
    assert again.num_parameters() == BY_ID[architecture].build().num_parameters() == made.num_parameters()
    again.dequantize()
    assert not list(sparse_modules(again)) and not hasattr(again.config, "quantization_config")
    torch.testing.assert_close(zoo(again), masked, atol=1e-6, rtol=1e-6)
    again.save_pretrained(tmp_path / "dense")
    assert torch.equal(zoo(zoo.auto.from_pretrained(tmp_path / "dense")), zoo(again))


@pytest.mark.parametrize("balance", ["row", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_density_times_dense_and_indices(balance, dtype, tmp_path):
    dense = BY_ID["llama"].build().to(dtype)
    dense.save_pretrained(tmp_path / "dense")
    made = pruned(balance=balance).to(dtype)
    lb.freeze(made).save_pretrained(tmp_path / "sparse")
    layouts = made.config.quantization_config.layouts
    stored = load_file(tmp_path / "sparse" / "model.safetensors")
    size = {k: v.nbytes for k, v in load_file(tmp_path / "dense" / "model.safetensors").items()}
    total = 0
    for name, layout in layouts.items():
        assert layout.sparsity == 0.75
        values = stored[f"{name}.weight"]
        assert values.nbytes == size[f"{name}.weight"] / 4 and values.dtype == dtype
        indices = stored[f"{name}.weight_col_indices"]
        assert indices.dtype == torch.int32 and indices.numel() == layout.live_blocks
        assert (f"{name}.weight_row_pointers" in stored) == (balance == "none")
        total += 0.75 * size[f"{name}.weight"] - indices.nbytes
    file = (tmp_path / "sparse" / "model.safetensors").stat().st_size
    wanted = (tmp_path / "dense" / "model.safetensors").stat().st_size - total
    # headers differ a little
    assert file == pytest.approx(wanted, rel=0.02)
    report = lb.report(made)
    rows = [m for m in report.modules if m.sparsity is not None]
    assert {m.sparsity for m in rows} == {0.75} and len(rows) == len(layouts)
    assert report.total_bytes == sum(p.nbytes for p in made.parameters())
    assert "75.00% of their blocks dead" in str(report)


def test_measured_sparsity_is_that_of_the_numbers(tmp_path):
    made = lb.freeze(pruned(sparsity=0.5))
    for _, module in sparse_modules(made):
        dense = module.dense_weight()
        blocks = dense.unflatten(1, (-1, 8)).unflatten(0, (-1, 8)).abs().amax((1, 3))
        assert (blocks == 0).float().mean() == module.measured_sparsity == 0.5


def test_a_dense_checkpoint_loads_to_be_pruned(dense_folder, caplog):
    made = AutoModelForCausalLM.from_pretrained(
        dense_folder("llama"), quantization_config=lb.BlastConfig(0.9, 8, dense_layers={"first": 1})
    )
    names = [name for name, module in sparse_modules(made) if isinstance(module, MaskedModule)]
    assert sorted(names) == [f"model.layers.1.mlp.{n}_proj" for n in ("down", "gate", "up")]
    assert {module.measured_sparsity for _, module in sparse_modules(made)} == {0.0}
    zoo = BY_ID["llama"]
    torch.testing.assert_close(zoo(made.eval()), zoo(zoo.build()))
    assert "being pruned to 90.0%" in str(lb.report(made))


@pytest.mark.parametrize(
    ("architecture", "config", "names"),
    [
        pytest.param("llama", {}, ["*.mlp.*_proj"], id="llama"),
        pytest.param("llama", {"targets": "attention"}, ["*.self_attn.*_proj"], id="attention"),
        pytest.param("llama", {"targets": "all"}, ["*.self_attn.*", "*.mlp.*"], id="all"),
        pytest.param("llama", {"targets": ["up_proj"]}, ["*.up_proj"], id="name"),
        pytest.param("llama", {"targets": ["re:layers\\.1\\.mlp\\..*"]}, ["*.layers.1.mlp.*"], id="pattern"),
        pytest.param("llama", {"dense_layers": [-1]}, ["*.layers.0.mlp.*"], id="last-dense"),
        pytest.param("llama", {"modules_to_not_convert": ["down_proj"]}, ["*.gate_proj", "*.up_proj"], id="skipped"),
        pytest.param("gpt2", {}, ["*.mlp.c_fc", "*.mlp.c_proj"], id="gpt2"),
        pytest.param("bert-masked-lm", {}, ["*.intermediate.dense", "*.layer.?.output.dense"], id="bert"),
        pytest.param("bart", {}, ["*.fc1", "*.fc2"], id="bart"),
        pytest.param("t5-gated", {}, ["*.DenseReluDense.*"], id="t5"),
        pytest.param(
            "vit", {}, ["*.fc1", "*.fc2", "*.intermediate.dense", "*.layer.?.output.dense", "*.mlp.*"], id="vit"
        ),
    ],
)
def test_what_is_chosen(architecture, config, names):
    made = lb.quantize(BY_ID[architecture].build(), lb.BlastConfig(**{"block_size": 8, **config}))
    found = [name for name, _ in sparse_modules(made)]
    assert found and all(any(fnmatch(name, pattern) for pattern in names) for name in found), found
    layers = [
        n
        for n, m in BY_ID[architecture].build().named_modules()
        if hasattr(m, "weight") and any(fnmatch(n, p) for p in names)
    ]
    if "dense_layers" not in config:
        assert sorted(found) == sorted(n for n in layers if "lm_head" not in n)


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        pytest.param("llama", {"block_size": 128}, r"larger than the weight \[96, 64\] of `model.layers.0.mlp.gate_",
                     id="block-too-large"),
        pytest.param("llama", {"targets": ["upproj"]}, "`targets` has 'upproj'", id="target-unknown"),
        pytest.param("llama", {"overrides": {"ffn": {"sparsity": 0.5}}}, "`overrides` has 'ffn'", id="override"),
        pytest.param("llama", {"modules_to_not_convert": ["ffn"]}, "`modules_to_not_convert` has 'ffn'", id="skip"),
        pytest.param("llama", {"dense_layers": {"first": 2}}, "nothing of LlamaForCausalLM would be", id="nothing"),
        pytest.param("mixtral", {"bits": 8, "rest": lb.DQTConfig(8)}, "fused experts, whose codes can't be trained",
                     id="experts-codes-trained"),
        pytest.param("mixtral", {"block_size": 128}, r"larger than the weight \[192, 64\] of `.*experts.gate_up_proj`",
                     id="block-larger-than-expert"),
        pytest.param("mamba", {}, "nothing of MambaForCausalLM", id="mamba"),
    ],
)  # fmt: skip
def test_refusals(architecture, config, message):
    with pytest.raises(ValueError, match=message):
        lb.quantize(BY_ID[architecture].build(), lb.BlastConfig(**{"block_size": 8, **config}))


def test_a_low_bit_model_and_a_second_conversion_are_refused():
    with pytest.raises(ValueError, match="blocks of codes can't be pruned"):
        lb.quantize(lb.quantize(BY_ID["llama"].build(), {"bits": 4}), lb.BlastConfig())
    with pytest.raises(ValueError, match="already quantized|block-sparse"):
        lb.quantize(lb.freeze(pruned()), lb.LowBitConfig())


def test_small_one_shot(dense_folder):
    config = lb.BlastConfig(0.02, 8, balance="none", one_shot=True)
    made = lb.quantize(BY_ID["llama"].build(), config)
    assert 0 < made.model.layers[0].mlp.up_proj.measured_sparsity < 0.03
    loaded = AutoModelForCausalLM.from_pretrained(dense_folder("llama"), quantization_config=config)
    assert torch.equal(loaded.model.layers[0].mlp.up_proj.weight, made.model.layers[0].mlp.up_proj.weight)
    assert len(list(sparse_modules(lb.freeze(loaded)))) == 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sparse")
    lb.freeze(pruned()).save_pretrained(path)
    return path


def test_transitions(folder):
    zoo, plain = BY_ID["llama"], AutoModelForCausalLM.from_pretrained(folder)
    further = AutoModelForCausalLM.from_pretrained(folder, quantization_config=lb.BlastConfig(0.9, 8))
    assert {type(m).__name__ for _, m in sparse_modules(further)} == {"MaskedLinear"}
    assert {m.target for _, m in sparse_modules(further)} == {0.9}
    assert {m.measured_sparsity for _, m in sparse_modules(further)} == {0.75}
    torch.testing.assert_close(zoo(further), zoo(plain), atol=1e-4, rtol=1e-4)
    dense = AutoModelForCausalLM.from_pretrained(folder, quantization_config=lb.BlastConfig(dequantize=True))
    assert type(dense.model.layers[0].mlp.up_proj) is nn.Linear and not hasattr(dense.config, "quantization_config")
    torch.testing.assert_close(zoo(dense), zoo(plain), atol=1e-4, rtol=1e-4)
    for config, message in ((lb.LowBitConfig(), "block-sparse"), (lb.DQTConfig(), "block-sparse"),
                            (lb.BlastConfig(0.9, 16), "`block_size`")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def test_a_low_bit_checkpoint_is_no_start(lowbit_folder):
    with pytest.raises(ValueError, match="blocks of codes can't be pruned"):
        AutoModelForCausalLM.from_pretrained(lowbit_folder("llama", bits=4), quantization_config=lb.BlastConfig())


def test_base_model_copies_shards_and_generation(folder, tmp_path):
    zoo, made = BY_ID["llama"], AutoModelForCausalLM.from_pretrained(folder)
    expected = zoo(made)
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(zoo(twin), expected)
        with torch.no_grad():
            twin.model.layers[0].mlp.up_proj.weight.zero_()
        assert torch.equal(zoo(made), expected)
    made.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(zoo(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)
    base = AutoModel.from_pretrained(folder)
    assert len(list(sparse_modules(base))) == 6
    assert zoo.generate(made).shape[1] > 7
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert half.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert half.model.layers[0].mlp.up_proj.weight_col_indices.dtype == torch.int32
    assert torch.isfinite(zoo(half)).all()


def test_masked_models_copy_and_pickle():
    zoo, made = BY_ID["llama"], pruned()
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(zoo(twin), zoo(made))
        assert torch.equal(twin.model.layers[0].mlp.up_proj.mask, made.model.layers[0].mlp.up_proj.mask)


def broken(folder, tmp_path, change, config=None):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    if config:
        config(stored["quantization_config"]["sparse"]["modules"])
    (tmp_path / "config.json").write_text(json.dumps(stored))
    return tmp_path


NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        pytest.param(lambda t: t.pop(f"{NAME}.weight_col_indices"), None, "col_indices` is missing", id="no-indices"),
        pytest.param(lambda t: t.pop(f"{NAME}.weight"), None, f"`{NAME}.weight` is missing", id="no-values"),
        pytest.param(lambda t: t.update({f"{NAME}.weight": torch.zeros(12, 1, 8, 8)}), None, "expected", id="values"),
        pytest.param(lambda t: t[f"{NAME}.weight_col_indices"].fill_(99), None, "outside", id="range"),
        pytest.param(lambda t: t[f"{NAME}.weight_col_indices"].fill_(1), None, "do not ascend", id="order"),
        pytest.param(lambda t: None, lambda m: m[NAME].update(shape=[96, 32]), "listed with shape", id="shape"),
        pytest.param(lambda t: None, lambda m: m.update({"model.layers.0.no_proj": m[NAME]}), "no such", id="name"),
        pytest.param(lambda t: None, lambda m: m.clear(), "does not say what|is damaged", id="empty"),
    ],
)  # fmt: skip
def test_damaged_checkpoints(folder, tmp_path, change, config, message):
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(broken(folder, tmp_path, change, config))


def test_disk_offload_is_refused(dense_folder):
    with pytest.raises(ValueError, match="to disk"):
        AutoModelForCausalLM.from_pretrained(
            dense_folder("llama"), quantization_config=lb.BlastConfig(), device_map={"": "disk"}
        )
