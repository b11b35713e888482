"""PEFT finds low-bit layers in any order of imports, adapts those it should, and refuses what would be wrong.

Public reports: huggingface/transformers#27380, QwenLM/Qwen#431 and #960, huggingface/diffusers#9108,
oobabooga/textgen#2183.
"""

import os
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lowbit as lb
from hf_lowbit.nn.packed import LowBitModule
from hf_lowbit.quantizers.adapter import LowBitAdapter
from tests.quantizers.architectures import BY_ID


ROOT = Path(__file__).parents[2]
FIELDS = {"bits": 4, "group_size": 32}


def lowbit(name="llama", **fields):
    return lb.quantize(BY_ID[name].build(), lb.LowBitConfig(**{**FIELDS, **fields}))


def fresh(code, *arguments, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment}
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("first", ["import peft, hf_lowbit", "import hf_lowbit, peft"])
def test_order_of_imports_does_not_matter(first):
    code = f"{first}; from peft.tuners.tuners_utils import BaseTuner; print(BaseTuner._hf_lowbit)"
    assert fresh(code, HF_LOWBIT_AUTOLOAD="0") == "True"


def test_adapter_is_read_in_a_fresh_process_that_knows_only_peft(lowbit_folder, tmp_path):
    folder = lowbit_folder("llama", **FIELDS)
    base = AutoModelForCausalLM.from_pretrained(folder)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False,
                                            task_type="CAUSAL_LM"))  # fmt: skip
    model.save_pretrained(tmp_path / "adapter")
    ids = BY_ID["llama"].inputs["input_ids"]
    torch.save((ids, BY_ID["llama"](model)), tmp_path / "expected.pt")
    code = (
        "import sys, torch; import _hf_lowbit_autoload; from peft import AutoPeftModelForCausalLM as A; "
        "ids, expected = torch.load(sys.argv[2]); torch.set_num_threads(1); "
        "m = A.from_pretrained(sys.argv[1]).eval(); y = m(ids).logits; "
        "d = m.merge_and_unload(safe_merge=True)(ids).logits; "
        "print(torch.equal(y, expected), bool((d - expected).norm() < 1e-4 * expected.norm()))"
    )
    assert fresh(code, tmp_path / "adapter", tmp_path / "expected.pt") == "True True"


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert-classifier"])
def test_all_linear_means_every_layer_but_the_head(name):
    model = lowbit(name)
    expected = {n for n, m in model.named_modules() if isinstance(m, (LowBitModule)) and not hasattr(m, "output_like")
                and len(m.lowbit) == 1 and "weight" in m.lowbit}  # fmt: skip
    task = "SEQ_CLS" if "classifier" in name else None
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type=task))
    prefix = "base_model.model."
    found = {n.removeprefix(prefix) for n, m in adapted.named_modules() if isinstance(m, LowBitAdapter)}
    assert found == expected and found


def test_all_linear_of_fused_experts_is_refused():
    """PEFT adds the fused experts of a mixture to "all-linear" by itself, as `target_parameters`."""
    with pytest.raises(ValueError, match="packed codes"):
        get_peft_model(lowbit("mixtral"), LoraConfig(target_modules="all-linear"))


def test_conv1d_gets_the_sizes_of_its_dense_weight():
    model = get_peft_model(lowbit("gpt2"), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    layer = model.base_model.model.transformer.h[0].attn.c_attn
    dense = BY_ID["gpt2"].build().transformer.h[0].attn.c_attn.weight
    assert (layer.in_features, layer.out_features) == tuple(dense.shape)


@pytest.mark.parametrize("kind", ["experts", "linear"])
def test_target_parameters_of_packed_weights_are_refused(kind):
    name, target = {"experts": ("mixtral", "experts.gate_up_proj"), "linear": ("llama", "q_proj.weight")}[kind]
    with pytest.raises(ValueError, match=r"`target_parameters`.*packed codes.*dequantize"):
        get_peft_model(lowbit(name), LoraConfig(target_modules=[], target_parameters=[target]))


@pytest.mark.parametrize("initialization", ["pissa", "pissa_niter_4", "olora"])
def test_initializations_that_change_the_base_are_refused(initialization):
    model = lowbit()
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=initialization)
    with pytest.raises(ValueError, match=r"`init_lora_weights`=.*q_proj.*dequantize"):
        get_peft_model(model, config)


@pytest.mark.parametrize("config", [peft.HRAConfig, peft.LoHaConfig, peft.LoKrConfig, peft.BOFTConfig])
def test_methods_that_read_the_weight_are_refused(config):
    with pytest.raises(ValueError, match="`peft_type`=.*q_proj.*LORA"):
        get_peft_model(lowbit(), config(target_modules=["q_proj"]))


def test_tied_codes_are_not_merged():
    model = lowbit("llama-tied", modules={"model.embed_tokens": lb.Scheme(bits=8, group_size=32)})
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["embed_tokens"], init_lora_weights=False))
    with pytest.raises(ValueError, match="shares its codes"):
        adapted.merge_adapter()


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_smollm2_adapter_reloads_and_merges(smollm2, tmp_path, dora):
    """The real model at 4 bits, in float32: in bfloat16 the noise of activations is as large as a small adapter."""
    config = lb.LowBitConfig(bits=4, group_size=64)
    base = AutoModelForCausalLM.from_pretrained(smollm2, quantization_config=config, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(smollm2)(
        "It is a truth universally acknowledged", return_tensors="pt"
    ).input_ids
    torch.manual_seed(0)
    fields = {"target_modules": ["q_proj"], "use_dora": dora, "task_type": "CAUSAL_LM"}
    model = get_peft_model(base, LoraConfig(r=8, **fields)).eval()
    with torch.no_grad():
        without = model(ids).logits
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
        expected = model(ids).logits
    model.save_pretrained(tmp_path)
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, expected)
        merged = again.merge_and_unload(safe_merge=True)(ids).logits
    # float32 sums in another order, over thirty layers
    assert (merged - expected).norm() < 0.01 * (expected - without).norm()
