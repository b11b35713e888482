"""A run that is killed inside of a stage goes on after its last finished weight or block, with an identical result."""

import signal
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_lowbit as lb
from hf_lowbit.compression import layer_stage
from hf_lowbit.compression.refine import blocks
from hf_lowbit.pipeline import run


DATA = torch.randint(0, 96, (4, 24), generator=torch.Generator().manual_seed(0))
GIVEN = {"bits": 3.6, "calibration": DATA, "stages": ("layer", "block")}
CHILD = """
import os, signal, sys, torch
import hf_lowbit as lb
from hf_lowbit.pipeline.journal import Journal
left, keep = {after}, Journal.keep

def kept(self, stage, key, *rest):
    global left
    keep(self, stage, key, *rest)
    if stage == {stage!r} and key != "plan":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

Journal.keep = kept
data = torch.randint(0, 96, (4, 24), generator=torch.Generator().manual_seed(0))
lb.compress({dense!r}, {out!r}, bits=3.6, calibration=data, stages=("layer", "block"))
"""


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    folder = tmp_path_factory.mktemp("dense")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(dense):
    return lb.compress(dense, **GIVEN)


def kill_after(after, stage, dense, out):
    """Run in a process of its own, which dies after so many finished parts of a stage."""
    code = CHILD.format(after=after, stage=stage, dense=str(dense), out=str(out))
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -signal.SIGKILL


def counted(monkeypatch, module, name):
    calls, plain = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: (calls.append(args), plain(*args, **kwargs))[1])
    return calls


@pytest.mark.skipif(sys.platform == "win32", reason="kills a process")
def test_the_layer_stage_goes_on_after_the_last_weight(dense, whole, tmp_path, monkeypatch):
    # in the second block, after two of the three that share their inputs: those are solved together again
    after, again = 9, 7
    out = tmp_path / "out"
    kill_after(after, "layer", dense, out)
    assert not out.exists()
    parts = list((tmp_path / ".out.part").glob("layer-*"))
    # the plan is a part too
    assert len(parts) == after + 1
    solved, planned = counted(monkeypatch, layer_stage, "solve"), counted(monkeypatch, run, "plan")
    result = lb.compress(dense, out, **GIVEN)
    assert sum(len(weights) for weights, *_ in solved) == again and not planned
    same(result, whole)
    assert not (tmp_path / ".out.part").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="kills a process")
def test_the_block_stage_goes_on_after_the_last_block(dense, whole, tmp_path, monkeypatch):
    out = tmp_path / "out"
    kill_after(1, "block", dense, out)
    assert out.exists(), "the layer stage is deployable"
    tuned = counted(monkeypatch, blocks, "Tuning")
    same(lb.compress(dense, out, **GIVEN), whole)
    assert len(tuned) == 1 and not (tmp_path / ".out.part").exists()


def same(one, other):
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert one.plan == other.plan
    assert one.stages["layer"]["modules"] == other.stages["layer"]["modules"]
    assert one.stages["block"]["blocks"] == other.stages["block"]["blocks"]


@pytest.fixture
def begun(dense, tmp_path, monkeypatch):
    """The folder of a run that failed in its layer stage."""
    solve, left = layer_stage.solve, [2]

    def failing(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return solve(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(layer_stage, "solve", failing)
        lb.compress(dense, tmp_path / "out", **GIVEN)
    return tmp_path / "out"


@pytest.mark.parametrize("changed", ["model", "calibration", "settings"])
def test_what_another_run_has_begun_is_refused(changed, begun, dense):
    model = LlamaForCausalLM.from_pretrained(dense)
    if changed == "model":
        model.model.norm.weight.data.mul_(1.5)
    given = {**GIVEN, "calibration": DATA.flip(0) if changed == "calibration" else DATA}
    given["bits"] = 4.0 if changed == "settings" else 3.6
    with pytest.raises(ValueError, match=f"another {changed}, which is not finished"):
        lb.compress(model, begun, **given)
    lb.compress(model, begun, **{**given, "stages": ("layer",)}, resume=False)
    assert not begun.with_name(".out.part").exists()


def test_damaged_parts_are_made_again(begun, dense, whole):
    for part in begun.with_name(".out.part").glob("*.safetensors"):
        part.write_bytes(part.read_bytes()[:20])
    same(lb.compress(dense, begun, **GIVEN), whole)
