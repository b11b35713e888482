"""Fused experts pruned in the real Trainer: a mask for each expert, exact zeros, resume, and what is saved."""

import copy
import math
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.nn.block_sparse import BlockWeight
from hf_lowbit.nn.masked_weight import MaskedWeight
from hf_lowbit.nn.sparse_experts import SparseExperts
from hf_lowbit.nn.sparsify import masked_modules, sparse_modules
from tests.quantizers.architectures import BY_ID
from tests.sparsity.runs import Watch, callback, different, model, snapshot, train


FAMILIES = ["mixtral", "qwen3-moe", "gpt-oss"]
IDS = torch.tensor([[1, 5, 9, 33, 7, 21, 60]])


def logits(made):
    with torch.no_grad():
        return made.eval()(IDS).logits


def stacks(made):
    return {name: weight for name, weight in sparse_modules(made) if ".experts." in name}


@pytest.mark.parametrize(
    ("architecture", "fields", "options", "given"),
    [
        pytest.param("mixtral", {}, {}, {}, id="mixtral"),
        pytest.param("qwen3-moe", {}, {"compute": "sparse"}, {}, id="qwen3-sparse-compute"),
        pytest.param("gpt-oss", {"block_size": (16, 20)}, {"compute": "sparse"}, {}, id="transposed-and-padded"),
        pytest.param("gpt-oss", {}, {"score": "act", "grow": "union"}, {}, id="transposed-activation-score"),
        pytest.param("mixtral", {"balance": "none"}, {"score": "act"}, {"max_grad_norm": 0.1}, id="unbalanced"),
        pytest.param("mixtral", {}, {}, {"bf16": True, "gradient_accumulation_steps": 2}, id="autocast-accumulation"),
        pytest.param("qwen3-moe", {"bits": 8}, {}, {"gradient_checkpointing": True}, id="codes-checkpointing"),
    ],
)
def test_training(architecture, fields, options, given, tmp_path):
    made, watch = model(architecture, **fields), Watch()
    trainer = train(tmp_path / "run", made, callback(**options), watchers=[watch], max_steps=12, **given)
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    found = stacks(made)
    assert len(found) == 4 and all(isinstance(weight, BlockWeight) for weight in found.values())
    for weight in found.values():
        layout = weight.layout
        kept = lb.configs.blast.kept_blocks(0.75, layout.pool)
        # every expert keeps as many blocks
        assert (weight.mask.flatten(1).sum(1) == kept * (layout.grid[0] if layout.balance == "row" else 1)).all()
    masks = [torch.stack([m.flatten(1).sum(1) for n, m in step.items() if "gate_up" in n]) for step in watch.masks]
    assert len({str(mask) for mask in masks}) > 2
    made.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert different(snapshot(made), snapshot(again)) == [] and len(stacks(again)) == 4
    # a Trainer leaves autocast on the model's forward
    assert "bf16" in given or torch.equal(logits(again), logits(made))
    assert again.num_parameters() == BY_ID[architecture].build().num_parameters()


def test_gradients_are_those_of_masked_dense_autograd():
    """Both ways to train, and both expert implementations, against autograd on the masked weights."""
    reference = BY_ID["mixtral"].build().train()
    reference.set_experts_implementation("eager")
    made = lb.quantize(copy.deepcopy(reference), lb.BlastConfig(0.5, 8))
    generator = torch.Generator().manual_seed(0)
    dense = dict(reference.named_parameters())
    for name, weight in masked_modules(made):
        weight.mask = torch.rand(weight.mask.shape, generator=generator) < 0.4
        weight.controlled = True
        weight.clear()
        with torch.no_grad():
            dense[name].copy_(weight.parameter)
    reference(IDS, labels=IDS).loss.backward()
    for implementation, sparse in (("eager", False), ("grouped_mm", False), ("batched_mm", False), ("eager", True)):
        made.set_experts_implementation(implementation)
        made.zero_grad()
        for _, weight in masked_modules(made):
            weight.sparse_compute = sparse
        made.train()(IDS, labels=IDS).loss.backward()
        grads = dict(made.named_parameters())
        for name, weight in masked_modules(made):
            alive = weight.mask.repeat_interleave(8, 1).repeat_interleave(8, 2)
            torch.testing.assert_close(grads[name].grad, dense[name].grad * alive, atol=1e-6, rtol=1e-4)
            assert (grads[name].grad[~alive] == 0).all()
        table = "model.embed_tokens.weight"
        torch.testing.assert_close(grads[table].grad, dense[table].grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"grow": "union", "compute": "sparse", "score": "act"}], ids=["default", "act"]
)
def test_resume(options, tmp_path):
    whole, resumed = model("mixtral"), model("mixtral")
    given = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6}
    first = train(tmp_path / "whole", whole, callback(**options), **given)
    checkpoint = tmp_path / "whole" / "checkpoint-6"
    second = train(tmp_path / "resumed", resumed, callback(**options), str(checkpoint), **given)
    assert different(snapshot(whole), snapshot(resumed)) == []
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (first, second)]
    assert losses[0] == losses[1]
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert all(isinstance(weight, MaskedWeight) for weight in stacks(loaded).values())


def test_experts_without_tokens_keep_their_blocks_and_do_not_grow():
    from hf_lowbit.sparsity.pruner import BlockPruner
    from hf_lowbit.sparsity.schedule import Schedule

    made = model("mixtral", sparsity=0.5)
    pruner = BlockPruner(made, Schedule(8, 1, decay=1), score="act", grow="budget")
    pruner.attach()
    experts = next(module for module in made.modules() if isinstance(module, SparseExperts))
    first = experts.stacks["gate_up_proj"]
    x, routing = torch.randn(6, 64), (torch.tensor([[0, 2]] * 6), torch.full((6, 2), 0.5))
    for step in (1, 2):
        pruner.before_step(step)
        experts.train()(x, *routing).square().sum().backward()
        assert (first.parameter.grad[[1, 3]] == 0).all() and (first.parameter.grad[[0, 2]] != 0).any()
        if step == 2:
            scores = pruner._scores(first)
        pruner.after_step(step)
    # without a token the best blocks by weight live; others gave way to blocks that the gradient chose
    count = int(first.mask[0, 0].sum())
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    by_weight = torch.zeros_like(first.mask).scatter_(-1, best, True)
    assert torch.equal(first.mask[[1, 3]], by_weight[[1, 3]]) and not torch.equal(first.mask[0], by_weight[0])


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("fields", [{}, {"bits": 4}, {"balance": "none", "bits": "ternary", "activations": "int8"}],
                         ids=["float", "4-bits", "ternary-int8"])  # fmt: skip
def test_packed_experts_live_everywhere(architecture, fields, tmp_path):
    """deepcopy, pickle, `.to`, torch.compile, dequantize, report, and the file."""
    made = lb.freeze(_random_masks(model(architecture, **fields)))
    wanted = logits(made)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(logits(other), wanted)
        assert all(w.owner is not v.owner for w, v in zip(stacks(other).values(), stacks(made).values(), strict=True))
    half = copy.deepcopy(made).to(torch.bfloat16)
    assert all(w.held("_scale") is None or w.held("_scale").dtype == torch.bfloat16 for w in stacks(half).values())
    assert logits(half).isfinite().all()
    rows = [row for row in lb.report(made).modules if row.sparsity is not None]
    assert len(rows) == 4 and all(row.bytes == stacks(made)[row.name].stored_bytes() for row in rows)
    dense = sum(p.numel() for p in BY_ID[architecture].build().parameters() if p.ndim == 3)
    assert sum(row.parameters for row in rows) == dense
    made.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path).dequantize()
    near = {"atol": 0.05 if "activations" in fields else 1e-4, "rtol": 0.05}
    torch.testing.assert_close(logits(back), wanted, **near)
    assert not stacks(back) and type(back.model.layers[0].mlp.experts).__name__ in str(
        type(BY_ID[architecture].build().model.layers[0].mlp.experts)
    )


def _random_masks(made):
    generator = torch.Generator().manual_seed(0)
    for _, weight in masked_modules(made):
        order = torch.rand(*weight.mask.shape[:-1], weight.mask.shape[-1], generator=generator).argsort(-1)
        weight.mask = order < max(1, weight.mask.shape[-1] // 4)
        weight.clear()
    return made


def test_compiled():
    """Live blocks without a graph break, whatever the routing; masks while nothing is trained, too."""
    for made in (lb.freeze(_random_masks(model("mixtral"))), model("mixtral").eval()):
        experts = made.model.layers[0].mlp.experts
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        for top in (torch.tensor([[0, 2]] * 6), torch.tensor([[1, 3]] * 3 + [[0, 1]] * 3)):
            inputs = torch.randn(6, 64), top, torch.full((6, 2), 0.5)
            with torch.no_grad():
                torch.testing.assert_close(compiled(*inputs), experts(*inputs))


def test_a_stack_beside_a_dense_one(tmp_path):
    """Only one of the two parameters is sparse: the other stays what it is, in training and when packed."""
    made = lb.quantize(BY_ID["mixtral"].build(), lb.BlastConfig(0.75, 8, targets=["down_proj"]))
    assert {name.rpartition(".")[2] for name, _ in masked_modules(made)} == {"down_proj"}
    train(tmp_path, made, callback(compute="sparse"), max_steps=8)
    wanted = logits(made)
    made.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), wanted)
    torch.testing.assert_close(logits(again.dequantize()), wanted, atol=1e-5, rtol=1e-4)


def test_rest_and_adapters(tmp_path):
    """The rest is rounded when the experts are packed; PEFT can't adapt a stack, and says so."""
    from peft import LoraConfig, get_peft_model

    made = model("mixtral", rest=lb.LowBitConfig(bits=8))
    train(tmp_path, made, callback(), max_steps=8)
    assert {type(m).__name__ for m in made.modules() if type(m).__name__.startswith("LowBit")} >= {"LowBitLinear"}
    with pytest.raises(ValueError, match="experts.*block-sparse"):
        get_peft_model(made, LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]))
    adapted = get_peft_model(lb.freeze(_random_masks(model("mixtral"))), LoraConfig(target_modules=["q_proj"]))
    adapted(IDS, labels=IDS).loss.backward()


def test_experts_outside_of_the_interface(tmp_path):
    """Llama 4's own forward multiplies whole stacks: it gets dense ones, made of the live blocks."""
    import transformers as hf

    from tests.nn.test_experts import LLAMA4

    torch.manual_seed(0)
    made = hf.Llama4ForCausalLM(hf.Llama4ForCausalLM.config_class(**LLAMA4))
    for parameter in made.parameters():
        if parameter.ndim == 3:
            torch.nn.init.normal_(parameter, std=0.1)
    made = lb.quantize(made, lb.BlastConfig(0.75, 8, targets=["experts"]))
    assert all(weight.layout.transposed for weight in stacks(made).values())
    with pytest.raises(ValueError, match='`score`="act" needs the inputs of each expert'):
        train(tmp_path / "act", copy.deepcopy(made), callback(score="act"), max_steps=8)
    train(tmp_path / "run", made, callback(compute="sparse"), watchers=[Watch()], max_steps=8)
    assert "put back into a dense stack for each forward" in str(lb.report(made))
    made.save_pretrained(tmp_path / "saved")
    again = hf.Llama4ForCausalLM.from_pretrained(tmp_path / "saved")
    wanted = logits(made)
    assert torch.equal(logits(again), wanted)
    # live blocks go on being trained as they are
    again.train()(IDS, labels=IDS).loss.backward()
    assert all((weight.held().grad != 0).any() for weight in stacks(again).values())
    torch.testing.assert_close(logits(again.dequantize()), wanted)


def test_the_card_counts_experts(tmp_path):
    from hf_lowbit.hub.facts import from_checkpoint, from_report

    made = lb.freeze(_random_masks(model("mixtral")))
    made.save_pretrained(tmp_path)
    facts = from_checkpoint(tmp_path)
    assert sum(g.parameters for g in facts.sparse) == sum(w.layout.parameters for w in stacks(made).values())
    assert facts.parameters == made.num_parameters()
    assert {g.bytes for g in facts.sparse} == {
        g.bytes for g in from_report(lb.report(made), "MixtralForCausalLM", made.config.to_dict()).sparse
    }


def test_a_damaged_file_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    lb.freeze(_random_masks(model("mixtral", balance="none"))).save_pretrained(tmp_path)
    tensors, key = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.experts.down_proj"
    broken = {**tensors, f"{key}_col_indices": torch.full_like(tensors[f"{key}_col_indices"], 99)}
    save_file(broken, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"`{key}` has block columns outside"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    save_file({k: v for k, v in tensors.items() if k != f"{key}_col_indices"}, tmp_path / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    with pytest.raises(ValueError, match=f"`{key}_col_indices` is missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_uncontrolled_stack_raises():
    with pytest.raises(RuntimeError, match="a block-sparse weight is trained, but nothing prunes it"):
        model("mixtral").train()(IDS, labels=IDS)


def test_nothing_is_packed_of_a_model_with_nan():
    made = model("mixtral", bits=8)
    with torch.no_grad():
        made.model.layers[1].mlp.experts._parameters["down_proj"][1, 3, 3] = float("nan")
    for _, weight in masked_modules(made):
        weight.mask[..., 0] = False
    with pytest.raises(ValueError, match="`model.layers.1.mlp.experts.down_proj` are to be rounded, .* NaN"):
        lb.freeze(made)
    assert all(isinstance(weight, MaskedWeight) for weight in stacks(made).values())


def test_blocks_too_wide_to_remove_any_are_named():
    with pytest.warns(
        UserWarning, match="nothing will be removed of 4 weights, such as `.*experts.gate_up_proj`: of 1"
    ):
        made = model("mixtral", block_size=64, sparsity=0.2)
    assert len(stacks(lb.freeze(made))) == 4
