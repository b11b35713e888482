"""The way a user takes: a dense checkpoint, the Trainer with its callback, a small file, and its equal logits."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer

import hf_lowbit as lb
from hf_lowbit.nn.block_sparse import BlockModule
from hf_lowbit.nn.sparsify import sparse_modules
from tests.quantizers.test_fresh_process import ROOT, load_elsewhere
from tests.training.runs import Sentences, arguments


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A Llama most of whose weights are MLPs, as in real ones."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, hidden_size=160, intermediate_size=640, num_hidden_layers=2,
                         num_attention_heads=5, max_position_embeddings=64)  # fmt: skip
    folder = tmp_path_factory.mktemp("dense")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(dense, tmp_path_factory):
    """(model after training, its folder)."""
    folder = tmp_path_factory.mktemp("sparse")
    model = AutoModelForCausalLM.from_pretrained(
        dense, quantization_config=lb.BlastConfig(sparsity=0.9, block_size=16)
    )
    trainer = Trainer(model=model, args=arguments(folder / "run", max_steps=12), train_dataset=Sentences(),
                      callbacks=[lb.BlastCallback(step_size=2)])  # fmt: skip
    trainer.train()
    model.save_pretrained(folder)
    return model, folder


def logits(model):
    with torch.inference_mode():
        return model.eval()(input_ids=torch.tensor([[1, 5, 9, 33]])).logits


def test_it_reloads_into_live_blocks_bit_for_bit(trained):
    model, folder = trained
    again = AutoModelForCausalLM.from_pretrained(folder)
    layers = [module for _, module in sparse_modules(again)]
    assert len(layers) == 6 and all(isinstance(module, BlockModule) for module in layers)
    assert torch.equal(logits(again), logits(model))


def test_the_sparsity_is_the_target_exactly(trained):
    for _, module in sparse_modules(trained[0]):
        assert module.measured_sparsity == pytest.approx(0.9, abs=1e-12)
        blocks = module.dense_weight().unflatten(1, (-1, 16)).unflatten(0, (-1, 16)).abs().amax((1, 3))
        assert (blocks == 0).float().mean() == pytest.approx(0.9, abs=1e-6)


def test_bytes_on_disk_are_density_times_dense_and_indices(trained, dense):
    _, folder = trained
    whole, small = ((f / "model.safetensors").stat().st_size for f in (dense, folder))
    layouts = AutoModelForCausalLM.from_pretrained(folder).config.quantization_config.layouts.values()
    sparse = sum(4 * layout.shape[0] * layout.shape[1] for layout in layouts)
    indices = sum(4 * layout.live_blocks for layout in layouts)
    assert small == pytest.approx(whole - sparse + 0.1 * sparse + indices, rel=0.02)
    assert small < 0.4 * whole


def test_the_report_shows_sparsity_bytes_and_kernel(trained):
    report = lb.report(trained[0])
    rows = [m for m in report.modules if m.sparsity is not None]
    assert {round(m.sparsity, 6) for m in rows} == {0.9} and all(m.kernel and m.reason for m in rows)
    assert sum(m.bytes for m in rows) == sum(m.stored_bytes() for _, m in sparse_modules(trained[0]))
    assert sum(m.parameters for m in report.modules) == report.total_parameters == trained[0].num_parameters()
    assert "90.00% of their blocks dead" in str(report)
    assert any(line.startswith("blocks") and "16x16" in line for line in str(report).splitlines())


def test_another_process_that_only_knows_transformers(trained):
    model, folder = trained
    found = load_elsewhere({"sparse": folder}, [str(ROOT)], hook=True)["sparse"]
    assert found["ours"] and found["sum"] == pytest.approx(logits(model).double().sum().item(), abs=1e-6)


def test_without_us_it_stops(trained, tmp_path):
    found = load_elsewhere({"sparse": trained[1]}, [str(tmp_path)], hook=False)["sparse"]
    assert "error" in found and "mismatch" in json.dumps(found)
