"""`compress(low_memory=True)` with calibration data: the codes of an ordinary run, one block at a time in float."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_lowbit as lb
from hf_lowbit.quantizers.spool import Spool
from tests.quantizers.architectures import BY_ID
from tests.quantizers.live_memory import LiveMemory


DATA = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(0))
GIVEN = {"bits": 4, "stages": ("layer",), "calibration": DATA}


def same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row_id", ["llama-tied", "gpt2", "mixtral"])
def test_the_result_is_that_of_an_ordinary_run(row_id, dtype, tmp_path):
    BY_ID[row_id].build().to(dtype).save_pretrained(tmp_path / "dense")
    low = lb.compress(tmp_path / "dense", tmp_path / "low", **GIVEN, low_memory=True)
    ordinary = lb.compress(tmp_path / "dense", **GIVEN)
    assert same(low.model, ordinary.model)
    trains = {name: p.requires_grad for name, p in ordinary.model.named_parameters()}
    assert {name: p.requires_grad for name, p in low.model.named_parameters()} == trains
    assert low.stages["layer"]["modules"] == ordinary.stages["layer"]["modules"]
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "low"), low.model)
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} == {"dense", "low"}, "no file of the work is left"


BLOCKS, WIDTH, INNER = 10, 64, 128


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """(folder of a checkpoint of many small blocks, bytes of one block)"""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=BLOCKS, num_attention_heads=4,
                         vocab_size=64)  # fmt: skip
    model, folder = LlamaForCausalLM(config), tmp_path_factory.mktemp("large")
    model.save_pretrained(folder)
    return folder, sum(p.nbytes for p in model.model.layers[0].parameters())


def test_no_more_than_one_block_is_in_float(large, tmp_path):
    folder, block = large
    with LiveMemory() as memory:
        result = lb.compress(folder, tmp_path / "low", **GIVEN, low_memory=True)
    lowbit = sum(p.nbytes for p in result.model.parameters())
    # beside the block: what is low-bit, and at work six matrices [K, K] and eight copies of a weight [N, K], float32
    work = 4 * (6 * INNER * INNER + 8 * WIDTH * INNER)
    assert memory.peak <= lowbit + block + work
    assert lowbit + block + work < 0.8 * BLOCKS * block


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads what is resident from /proc")
def test_a_released_weight_takes_no_memory_and_has_its_numbers(tmp_path):
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    weight = torch.arange(4_000_000, dtype=torch.float32)
    spool = Spool(tmp_path)
    mapped = spool.put("layers.1.weight", weight, torch.float32)
    spool.release()
    before = resident()
    assert torch.equal(mapped, weight)
    touched = resident()
    spool.release("layers.10.")
    assert resident() >= touched - 1_000_000
    spool.release("layers.1.")
    assert touched - before > 10_000_000 and resident() - before < 4_000_000
    assert torch.equal(mapped, weight)
    spool.close()
    assert torch.equal(mapped, weight) and not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_and_leaves_nothing(large, tmp_path, monkeypatch):
    def full(self, name, tensor, dtype):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Spool, "put", full)
    with pytest.raises((OSError, RuntimeError)):
        lb.compress(large[0], tmp_path / "low", **GIVEN, low_memory=True)
    assert not (tmp_path / "low").exists() and not [p for p in tmp_path.iterdir() if p.is_dir()]


def test_what_needs_the_dense_model_is_refused(large):
    with pytest.raises(ValueError, match="block and global stages need"):
        lb.compress(large[0], bits=4, calibration=DATA, low_memory=True)
    with pytest.raises(ValueError, match="can't plan"):
        lb.compress(large[0], **{**GIVEN, "bits": 3.5}, low_memory=True)


def test_data_counts_when_it_goes_on(tmp_path):
    BY_ID["llama"].build().save_pretrained(tmp_path / "dense")
    lb.compress(tmp_path / "dense", tmp_path / "low", **GIVEN, low_memory=True)
    with pytest.raises(ValueError, match="another calibration"):
        lb.compress(tmp_path / "dense", tmp_path / "low", **{**GIVEN, "calibration": DATA.flip(0)}, low_memory=True)
