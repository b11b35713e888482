"""Adapters that start from the quantization error bring the model nearer to the dense one, on every grid."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hf_lowbit as lb
from tests.quantizers.architectures import BY_ID


def adapted(name, bits, rank=8, **fields):
    """The dense model, and its low-bit form with an adapter that does nothing yet."""
    dense = BY_ID[name].build()
    lowbit = lb.quantize(copy.deepcopy(dense), lb.LowBitConfig(bits=bits, group_size=32, activations="float"))
    return dense, get_peft_model(lowbit, LoraConfig(r=rank, target_modules="all-linear", **fields))


@pytest.mark.parametrize("bits", ["ternary", 2, 3, 4, 8])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_error_falls_in_weights_and_outputs(name, bits):
    run = BY_ID[name]
    dense, model = adapted(name, bits)
    expected, without = run(dense), run(model)
    falls = lb.initialize_from_error(model, dense)
    assert falls and all(fall.after < 0.95 * fall.before for fall in falls)
    assert (run(model) - expected).norm() < (without - expected).norm()


def test_it_is_the_nearest_of_its_rank():
    dense, model = adapted("llama", 3, rank=6, lora_alpha=24, use_rslora=True)
    falls = lb.initialize_from_error(model, dense)
    for fall in falls:
        layer = model.get_submodule(f"base_model.model.{fall.module}")
        weight = dense.get_submodule(fall.module).weight.detach()
        singular = torch.linalg.svdvals(weight - layer.get_base_layer().dense_weight())
        best = float(singular[6:].norm() / weight.norm())
        assert best <= fall.after * (1 + 1e-4) and fall.after < best * 1.01
        added = weight - layer.get_base_layer().dense_weight() - layer.get_delta_weight("default").detach()
        assert float(added.norm() / weight.norm()) == pytest.approx(fall.after, rel=1e-4)


def test_a_folder_will_do_and_the_base_stays(tmp_path):
    dense, model = adapted("llama", 4)
    dense.save_pretrained(tmp_path)
    before = {n: p.clone() for n, p in model.named_parameters() if "lora_" not in n}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    from_folder = lb.initialize_from_error(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert from_folder == lb.initialize_from_error(model, dense)
    assert all(torch.equal(tensor, model.get_parameter(name)) for name, tensor in before.items())


def test_a_rank_above_the_matrix_s_own_holds_all_of_it():
    dense, model = adapted("llama", 2, rank=80)
    assert all(fall.after < 1e-5 for fall in lb.initialize_from_error(model, dense))


def test_refusals():
    dense, model = adapted("llama", 4)
    with pytest.raises(ValueError, match="`adapter_name`='other': no low-bit layer"):
        lb.initialize_from_error(model, dense, "other")
    with pytest.raises(ValueError, match="not the model that was quantized"):
        lb.initialize_from_error(model, BY_ID["gpt2"].build())
    model.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"):
        lb.initialize_from_error(model, dense)
    dense, dora = adapted("llama", 4, use_dora=True)
    with pytest.raises(ValueError, match="uses DoRA"):
        lb.initialize_from_error(dora, dense)
