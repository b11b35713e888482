"""Scales of groups in float32, which imported checkpoints need: in schemes, files, products and training."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.functional.dispatch import use_kernel
from hf_lowbit.functional.linear import linear
from hf_lowbit.nn.packed import LowBitModule
from tests.imports import gptq_writer


IDS = torch.arange(3, 43).view(2, 20)
# kernels sum in another order, and int8 activations may fall on the other side of a step
SUMS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def test_one_spelling_for_one_scheme():
    assert lb.Scheme(4, 32, scales="bfloat16") == lb.Scheme(4, 32)
    assert lb.Scheme(4, None, scales="float32") == lb.Scheme(4, None)
    assert "scales" not in lb.Scheme(4, 32).to_dict()
    assert lb.Scheme(4, 32, scales="float32").to_dict()["scales"] == "float32"
    with pytest.raises(ValueError, match="`scales`='float16' is not supported"):
        lb.Scheme(4, 32, scales="float16")


@pytest.fixture
def config():
    scheme = lb.Scheme(4, 32, scales="float32")
    return lb.LowBitConfig(bits=4, group_size=32, modules={"re:.*_proj": scheme})


def test_quantized_saved_and_loaded(llama, tmp_path, config):
    model = lb.quantize(llama, config)
    scales = [m.weight_scale for m in model.modules() if isinstance(m, LowBitModule)]
    assert len(scales) == 7 and all(s.dtype == torch.float32 for s in scales)
    # no cut to bfloat16 on the way
    assert any(bool((s.to(torch.bfloat16) != s).any()) for s in scales)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert "float32" in str(again.config.quantization_config.modules["model.layers.0.mlp.up_proj"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bits", ["ternary", 2, 3, 4, 8])
def test_products_are_those_of_the_reference(llama, bits, dtype):
    layer = lb.Scheme(bits, 32, scales="float32")
    model = lb.quantize(llama.to(dtype), lb.LowBitConfig(modules={"re:.*_proj": layer})).eval()
    module = model.model.layers[0].mlp.up_proj
    # the same shapes with bfloat16 scales in between: what was remembered for one must not serve the other
    narrow = module.weight_scale.to(torch.bfloat16)
    with torch.no_grad():
        for rows in (1, 40):
            x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(dtype)
            found = module(x)
            with use_kernel("reference"):
                expected = module(x)
            torch.testing.assert_close(found, expected, atol=SUMS[dtype], rtol=SUMS[dtype])
            cut = linear(x, module.weight, narrow, module.weight_zero_point, None, *module.lowbit["weight"].product)
            assert not torch.equal(cut, found)
            assert torch.equal(module(x), found)


def test_trained_directly(llama, tmp_path):
    gptq_writer.write(tmp_path / "gptq", llama, bits=4, group_size=32, sym=True)
    lb.import_checkpoint(tmp_path / "gptq", tmp_path / "out")
    wishes = {"quantization_config": lb.DQTConfig(bits=4, group_size=32), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **wishes)
    before = lb.codes(model.model.layers[0].mlp.up_proj)
    optimizer = lb.DQTOptimizer(model, lr=1e-2)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    after = lb.codes(model.model.layers[0].mlp.up_proj)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1]) and after[1].dtype == torch.float32
