"""Checkpoints that are damaged, tampered with or made for something else: a sentence, never a crash, never garbage."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_lowbit import LowBitConfig, export
from tests.quantizers.architectures import BY_ID
from tests.quantizers.live_memory import LiveMemory


UP = "model.layers.1.mlp.up_proj"
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
# far below any weight that the tampered configs claim, and above what building a config and a model on meta needs
SMALL_CHANGE = 1 << 20


@pytest.fixture
def damaged(lowbit_folder, tmp_path):
    """architecture, fields -> a folder of its own with that checkpoint"""

    def folder(architecture, **fields):
        return shutil.copytree(lowbit_folder(architecture, **{"group_size": 32, **fields}), tmp_path / "checkpoint")

    return folder


def edit_config(folder, edit, keep_digest=False):
    """What is changed must be found out by itself, unless the digest is what a test is about."""
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    if not keep_digest:
        config["quantization_config"].pop("modules_digest", None)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def assert_refused(folder, message, error=ValueError):
    """Loading stops with `message`, before any large tensor is made."""
    with LiveMemory() as memory, pytest.raises(error, match=message):
        AutoModelForCausalLM.from_pretrained(folder)
    assert memory.peak <= SMALL_CHANGE


@pytest.mark.parametrize(
    "kept", [0, 4, 100, 20_000, -1], ids=["nothing", "length", "header", "half", "all-but-a-byte"]
)
def test_truncated_file(damaged, kept):
    folder = damaged("llama")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:kept])
    assert_refused(folder, "model.safetensors` can't be read.*truncated or damaged")


def test_header_that_claims_a_huge_length(damaged):
    folder = damaged("llama")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + data[8:])
    assert_refused(folder, "model.safetensors` can't be read")


@pytest.mark.parametrize("suffix", ["", "_scale", "_zero_point"], ids=["codes", "scale", "zero-point"])
@pytest.mark.parametrize(
    ("architecture", "name"),
    [pytest.param("llama", f"{UP}.weight", id="linear"), pytest.param("mixtral", EXPERTS, id="experts")],
)
def test_missing_tensor(damaged, architecture, name, suffix):
    folder = damaged(architecture, bits=3)
    edit_tensors(folder, lambda tensors: tensors.pop(name + suffix))
    assert_refused(folder, f"`{name}{suffix}` is missing")


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        pytest.param("", lambda t: t.float(), "is F32 .*expected I8", id="float-codes"),
        pytest.param("", lambda t: t.view(torch.uint8), "is U8 .*expected I8", id="unsigned-codes"),
        pytest.param("", lambda t: t[0].clone(), r"is I8 \(96, 24\), expected I8 \(1, 96, 24\)", id="dense-rank"),
        pytest.param("", lambda t: t[..., :-1].clone(), r"is I8 \(1, 96, 23\), expected I8 \(1, 96, 24\)", id="short"),
        pytest.param("_scale", lambda t: t.float(), "is F32 .*expected BF16", id="float32-scale"),
        pytest.param("_scale", lambda t: t.to(torch.int8), "is I8 .*expected BF16", id="integer-scale"),
        pytest.param("_scale", lambda t: t[:, :1].clone(), r"is BF16 \(96, 1\), expected BF16 \(96, 2\)", id="fewer"),
        pytest.param("_zero_point", lambda t: t.float(), "is F32 .*expected I8", id="float-zero-point"),
    ],
)
def test_tensor_of_another_dtype_or_shape(damaged, suffix, change, message):
    folder, name = damaged("llama", bits=3), f"{UP}.weight{suffix}"
    edit_tensors(folder, lambda tensors: tensors.update({name: change(tensors[name])}))
    assert_refused(folder, f"`{name}` {message}")


@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        pytest.param("llama", f"{UP}.weight_scale", id="linear"),
        pytest.param("mixtral", f"{EXPERTS}_scale", id="experts"),
    ],
)
def test_scale_that_no_quantizer_writes(damaged, architecture, name, value):
    folder = damaged(architecture)
    edit_tensors(folder, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    layer = name.removesuffix("_scale").removesuffix(".weight")
    assert_refused(folder, f"`{layer}` has a scale that is not a positive number")


@pytest.mark.parametrize("byte", [0b11, 0b11000000, -1], ids=["first", "last", "all"])
def test_fourth_value_of_ternary_codes(damaged, byte):
    folder = damaged("llama", bits="ternary")
    signed = byte - 256 if byte > 127 else byte
    edit_tensors(folder, lambda tensors: tensors[f"{UP}.weight"].view(-1)[-1:].fill_(signed))
    assert_refused(folder, rf"`{UP}` has codes outside \{{-1, 0, 1\}}")


@pytest.mark.parametrize(("bits", "value"), [(2, 2), (2, -3), (3, 4), (3, -5)])
def test_zero_point_outside_the_grid(damaged, bits, value):
    folder = damaged("llama", bits=bits)
    edit_tensors(folder, lambda tensors: tensors[f"{UP}.weight_zero_point"].view(-1)[:1].fill_(value))
    assert_refused(folder, f"`{UP}` has zero points outside")


def test_every_problem_is_listed_up_to_a_few(damaged):
    folder = damaged("llama")
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("_scale")])
    assert_refused(folder, r"q_proj.weight_scale` is missing; .*and 8 more")


@pytest.mark.parametrize(
    ("edit", "message", "error"),
    [
        pytest.param(lambda q: q.update(format_version=2), "`format_version`=2 is newer than 1.*upgrade", ValueError,
                     id="newer-format"),
        pytest.param(lambda q: q.update(format_version="one"), "`format_version`='one'", ValueError, id="no-number"),
        pytest.param(lambda q: q.update(sparsity=0.5), "no field `sparsity`", TypeError, id="unknown-field"),
        pytest.param(lambda q: q.pop("modules"), "has no `modules` with shapes", ValueError, id="no-modules"),
        pytest.param(lambda q: q.update(modules={}), "has no `modules` with shapes", ValueError, id="empty-modules"),
        pytest.param(lambda q: q["modules"][UP].pop("shape"), f"`{UP}` is listed.*None", ValueError, id="no-shape"),
        pytest.param(lambda q: q["modules"][UP].update(bits=5), r"up_proj'\]`: `bits`=5", ValueError, id="bits-5"),
        pytest.param(lambda q: q["modules"][UP].update(bits=8), f"`{UP}.weight` is I8", ValueError, id="other-bits"),
        pytest.param(lambda q: q["modules"][UP].update(group_size=8), "weight_scale` is BF16", ValueError,
                     id="other-groups"),
        pytest.param(lambda q: q["modules"][UP].update(symmetric=False), "zero_point` is missing", ValueError,
                     id="zero-points-claimed"),
        pytest.param(lambda q: q["modules"][UP].update(scale=1), r"up_proj'\]`.*scale", TypeError, id="scheme-field"),
        pytest.param(lambda q: q["modules"][UP].update(shape=[64, 96]), rf"`{UP}` is listed with shape \(64, 96\)",
                     ValueError, id="transposed"),
        pytest.param(lambda q: q["modules"][UP].update(shape=[1 << 40, 1 << 40]), f"`{UP}` is listed with shape",
                     ValueError, id="huge-shape"),
        pytest.param(lambda q: q["modules"][UP].update(shape=[-96, 64]), r"`shape`=\[-96, 64\]", ValueError,
                     id="negative-shape"),
        pytest.param(lambda q: q["modules"].update({"model.layers.7.mlp.up_proj": q["modules"][UP]}),
                     "`model.layers.7.mlp.up_proj` is listed as low-bit, but LlamaForCausalLM has no such", ValueError,
                     id="no-such-module"),
        pytest.param(lambda q: q["modules"].update({"model.norm": q["modules"][UP]}), "`model.norm` is listed",
                     ValueError, id="not-convertible"),
        pytest.param(lambda q: q["modules"].pop(UP), f"`{UP}.weight` holds codes", ValueError, id="unlisted"),
    ],
)  # fmt: skip
def test_tampered_quantization_config(damaged, edit, message, error):
    folder = damaged("llama")
    edit_config(folder, lambda config: edit(config["quantization_config"]))
    assert_refused(folder, message, error)


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        # 64 columns in groups of 40 are two groups, as in groups of 32; ternary codes have 2 bits
        pytest.param({"bits": 4}, {"group_size": 40}, id="group-size"),
        pytest.param({"bits": "ternary", "group_size": 32}, {"bits": 2, "symmetric": True}, id="bits"),
    ],
)
def test_config_that_reads_the_same_bytes_in_another_way(damaged, fields, change):
    folder = damaged("llama", **fields)
    edit_config(folder, lambda config: config["quantization_config"]["modules"][UP].update(change), keep_digest=True)
    assert_refused(folder, "modules_digest.*changed after the tensors were saved")


def test_activations_may_be_changed_by_hand(damaged):
    folder = damaged("llama")
    change = {"activations": "int8"}
    edit_config(folder, lambda config: config["quantization_config"]["modules"][UP].update(change), keep_digest=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.get_submodule(UP).lowbit["weight"].scheme.activations == "int8"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param({"hidden_size": 1 << 20}, "does not fit the model", id="hidden-size"),
        pytest.param({"intermediate_size": 1 << 24}, "does not fit the model", id="intermediate-size"),
        pytest.param({"vocab_size": 1 << 32}, "lacks 549,755,813,888", id="vocabulary"),
        pytest.param({"num_hidden_layers": 64}, "lacks .*model.layers.2", id="layers"),
        pytest.param({"num_hidden_layers": 1}, "`model.layers.1.self_attn.q_proj` is listed", id="fewer-layers"),
    ],
)
def test_config_that_claims_a_larger_model(damaged, edit, message):
    folder = damaged("llama")
    edit_config(folder, lambda config: config.update(edit))
    assert_refused(folder, message)


def test_config_that_claims_more_experts(damaged):
    folder = damaged("mixtral")
    edit_config(folder, lambda config: config.update(num_local_experts=1 << 20))
    assert_refused(folder, "gate_up_proj` is listed with shape")


def test_dense_tensor_of_another_shape(damaged):
    folder = damaged("llama")
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(65, 64)}))
    assert_refused(folder, "lm_head.weight|ignore_mismatched_sizes", (ValueError, RuntimeError))


def test_both_lie_about_the_shape(damaged):
    """Config and module list agree on a huge layer: the file's own header decides."""
    folder = damaged("llama")

    def claim(config):
        config["intermediate_size"] = size = 1 << 24
        for name, module in config["quantization_config"]["modules"].items():
            if "mlp" in name:
                module["shape"] = [64, size] if "down_proj" in name else [size, 64]

    edit_config(folder, claim)
    assert_refused(folder, "tensors do not fit its config: .*expected I8")


def test_quant_method_of_nobody(damaged):
    """transformers warns and goes on as for a dense checkpoint: the stored shapes stop it."""
    folder = damaged("llama", bits=8)
    edit_config(folder, lambda config: config["quantization_config"].update(quant_method="hf_low_bit"))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(folder)


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was run')",)


def test_a_pickle_that_runs_code_is_not_run(damaged):
    folder = damaged("llama")
    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump({f"{UP}.weight": Bomb()}, file)
    assert_refused(folder, "pytorch_model.bin` can't be read")


@pytest.mark.parametrize("low_bit", [True, False], ids=["low-bit", "on-the-fly"])
@pytest.mark.parametrize("absolute", [True, False], ids=["absolute", "relative"])
def test_an_index_that_points_outside_of_its_folder(damaged, dense_folder, tmp_path, low_bit, absolute):
    folder = damaged("llama")
    if not low_bit:
        shutil.rmtree(folder)
        shutil.copytree(dense_folder("llama"), folder)
    shutil.move(folder / "model.safetensors", tmp_path / "secret.safetensors")
    names = load_file(tmp_path / "secret.safetensors")
    place = str(tmp_path / "secret.safetensors") if absolute else "../secret.safetensors"
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, place)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fields = {} if low_bit else {"quantization_config": LowBitConfig(group_size=32)}
    with pytest.raises(ValueError, match=r"secret.safetensors`, outside of its folder"):
        AutoModelForCausalLM.from_pretrained(folder, **fields)
    if low_bit:
        with pytest.raises(ValueError, match=r"secret.safetensors`, outside of its folder"):
            export(folder, tmp_path / "out", "compressed-tensors")


def test_the_undamaged_copy_loads(damaged):
    architecture = BY_ID["llama"]
    folder = damaged("llama")
    edit_tensors(folder, lambda tensors: None)
    edit_config(folder, lambda config: None)
    assert torch.isfinite(architecture(AutoModelForCausalLM.from_pretrained(folder))).all()
