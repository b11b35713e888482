"""LoRA on block-sparse layers: trains, is saved and loaded, and is never merged into them without a word."""

import pytest
import torch

import hf_lowbit as lb
from hf_lowbit.nn.sparsify import sparse_modules
from tests.quantizers.architectures import BY_ID
from tests.quantizers.test_sparse import pruned


peft = pytest.importorskip("peft")
ZOO = BY_ID["llama"]


def adapted(sparse=None, **fields):
    base = lb.freeze(pruned(**(sparse or {})))
    config = peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": True, **fields})
    return base, peft.get_peft_model(base, config)


def test_adapters_train_and_reload(tmp_path):
    base, model = adapted()
    before = {name: module.weight.clone() for name, module in sparse_modules(base)}
    assert len(before) == 6
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for _ in range(3):
        ids = ZOO.inputs["input_ids"]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(module.weight, before[name]) for name, module in sparse_modules(base))
    expected = ZOO(model.eval())
    assert not torch.equal(expected, ZOO(lb.freeze(pruned()).eval()))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(lb.freeze(pruned()), tmp_path)
    torch.testing.assert_close(ZOO(again.eval()), expected)


def test_adapters_beside_low_bit_blocks_and_a_low_bit_rest(tmp_path):
    sparse = {"bits": 8, "rest": {"bits": 8, "group_size": None}}
    base, model = adapted(sparse, init_lora_weights="gaussian")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items() if "lora" not in name}
    ids = ZOO.inputs["input_ids"]
    model.train()(input_ids=ids, labels=ids).loss.backward()
    gradients = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert any("mlp.up_proj.lora_B" in n for n in gradients) and any("q_proj.lora_B" in n for n in gradients)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer.step()
    assert all(torch.equal(tensor, base.state_dict()[name]) for name, tensor in before.items())
    expected = ZOO(model.eval())
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(lb.freeze(pruned(**sparse)), tmp_path)
    torch.testing.assert_close(ZOO(again.eval()), expected)
    with pytest.raises(ValueError, match="block-sparse: merging"):
        model.merge_and_unload()


@pytest.mark.parametrize("safe", [True, False])
def test_merge_is_refused_and_changes_nothing(safe):
    _, model = adapted(init_lora_weights="gaussian")
    expected = ZOO(model.eval())
    with pytest.raises(ValueError, match="`.*mlp.gate_proj` is block-sparse: merging an adapter.*dense"):
        model.merge_and_unload(safe_merge=safe) if not safe else model.base_model.model.model.layers[
            0
        ].mlp.gate_proj.merge(True)
    if safe:
        assert torch.equal(ZOO(model), expected)


def test_unload_gives_the_sparse_model_back():
    base, model = adapted()
    assert torch.equal(ZOO(model.unload().eval()), ZOO(lb.freeze(pruned()).eval()))


@pytest.mark.parametrize("fields", [{"use_dora": True}, {"init_lora_weights": "pissa"}], ids=str)
def test_what_reads_the_weight_is_refused(fields):
    with pytest.raises(ValueError, match="only LoRA without DoRA"):
        adapted(**fields)


def test_other_methods_are_refused():
    with pytest.raises(ValueError, match="`peft_type`=IA3"):
        peft.get_peft_model(
            lb.freeze(pruned()), peft.IA3Config(target_modules=["up_proj"], feedforward_modules=["up_proj"])
        )


@pytest.mark.parametrize("fields", [{}, {"bits": 8, "rest": lb.DQTConfig(8)}], ids=["floats", "codes"])
def test_a_merge_into_a_layer_that_is_being_pruned_is_refused(fields):
    base = lb.quantize(ZOO.build(), lb.BlastConfig(0.75, 8, **fields))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["up_proj"]))
    ids = ZOO.inputs["input_ids"]
    model.train()(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(ValueError, match="up_proj` is block-sparse: merging"):
        model.merge_and_unload()
