"""Several adapters on one low-bit model, methods that read the weight on every scheme, adapters of other bases."""

import copy

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

import hf_lowbit as lb
from hf_lowbit.nn.packed import LowBitModule
from tests.quantizers.architectures import BY_ID


RUN = BY_ID["llama"]
SCHEMES = [
    ("ternary", "tensor", True), ("ternary", 32, True), (2, 32, False), (2, None, True), (3, 32, True),
    (3, None, False), (4, 48, True), (4, "tensor", False), (8, None, True), (8, 32, False),
]  # fmt: skip
METHODS = {
    "dora": lambda: LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True, init_lora_weights=False),
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj", "down_proj"], oft_block_size=8, r=0, init_weights=False),
}


def lowbit(bits=4, group_size=32, symmetric=None, scales=None):
    scheme = lb.Scheme(bits, group_size, symmetric, "float", scales)
    return lb.quantize(RUN.build(), lb.LowBitConfig(modules={"re:.*_proj": scheme}, activations="float"))


def codes(model):
    return [p.detach().clone() for p in model.parameters() if p.dtype == torch.int8]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: "-".join(map(str, scheme)))
@pytest.mark.parametrize("method", METHODS)
def test_methods_that_read_the_weight_on_every_scheme(method, scheme):
    base = lowbit(*scheme)
    dense, without = copy.deepcopy(base).dequantize(), RUN(base)
    torch.manual_seed(0)
    model = get_peft_model(base, METHODS[method]())
    torch.manual_seed(0)
    expected = RUN(get_peft_model(dense, METHODS[method]()))
    change = (expected - without).norm()
    assert change > 0.05 and (RUN(model) - expected).norm() < 1e-3 * change
    before = codes(model)
    model.merge_adapter(safe_merge=True)
    assert (RUN(model) - expected).norm() < 1e-3 * change
    model.unmerge_adapter()
    assert all(map(torch.equal, codes(model), before))


def test_several_adapters_are_switched_combined_and_deleted(tmp_path):
    base = lowbit()
    without = RUN(base)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(base, config, adapter_name="one")
    model.add_adapter("two", config)
    outputs = {}
    for name in ("one", "two"):
        model.set_adapter(name)
        outputs[name] = RUN(model)
    assert (outputs["one"] - outputs["two"]).norm() > 0.1
    with model.disable_adapter():
        assert torch.equal(RUN(model), without)
    model.add_weighted_adapter(["one", "two"], [1.0, 0.0], "mixed", combination_type="cat")
    model.set_adapter("mixed")
    torch.testing.assert_close(RUN(model), outputs["one"], atol=1e-4, rtol=1e-4)
    model.delete_adapter("mixed")
    model.save_pretrained(tmp_path)
    fresh = PeftModel.from_pretrained(lowbit(), tmp_path / "one", adapter_name="one")
    fresh.load_adapter(tmp_path / "two", "two")
    for name, expected in outputs.items():
        fresh.set_adapter(name)
        assert torch.equal(RUN(fresh), expected)
    before = codes(fresh)
    fresh.merge_adapter(["two"])
    assert not any(isinstance(m, LowBitModule) for n, m in fresh.named_modules() if n.endswith("q_proj.base_layer"))
    fresh.unmerge_adapter()
    assert all(map(torch.equal, codes(fresh), before))


def test_adapters_over_float32_scales():
    base = lowbit(4, 32, True, "float32")
    dense = copy.deepcopy(base).dequantize()
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(base, config)
    torch.manual_seed(0)
    expected = RUN(get_peft_model(dense, config))
    torch.testing.assert_close(RUN(model), expected, atol=1e-4, rtol=1e-4)
    with lb.merge_as("requantize") as losses:
        merged = model.merge_and_unload(safe_merge=True)
    assert losses and all(
        m.weight_scale.dtype == torch.float32 for m in merged.modules() if isinstance(m, LowBitModule)
    )


def test_an_adapter_of_another_base_is_refused(tmp_path):
    other = lb.quantize(BY_ID["qwen2"].build(), lb.LowBitConfig(bits=4, group_size=32))
    wide = RUN.build().config
    wide.intermediate_size *= 2
    model = lb.quantize(type(RUN.build())(wide), lb.LowBitConfig(bits=4, group_size=32))
    get_peft_model(model, LoraConfig(r=4, target_modules=["up_proj"])).save_pretrained(tmp_path / "wide")
    with pytest.raises(RuntimeError, match="size mismatch for .*up_proj"):
        PeftModel.from_pretrained(lowbit(), tmp_path / "wide")
    gpt2 = lb.quantize(BY_ID["gpt2"].build(), lb.LowBitConfig(bits=4, group_size=32))
    get_peft_model(gpt2, LoraConfig(r=4, target_modules=["c_attn"])).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="c_attn.* not found in the base model"):
        PeftModel.from_pretrained(other, tmp_path / "gpt2")


def test_low_bit_modules_to_save_are_refused_with_the_way_out():
    for module in ("up_proj", "mlp"):
        with pytest.raises(ValueError, match="`modules_to_save`.*`modules_to_not_convert`"):
            get_peft_model(lowbit(), LoraConfig(target_modules=["q_proj"], modules_to_save=[module]))
    # a dense one is trained and saved as ever
    get_peft_model(lowbit(), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
