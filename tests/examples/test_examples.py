"""Every example runs as a user would run it, at small settings, and says what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(name, *arguments, cwd, **variables):
    """Run an example in an empty directory; what it printed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **variables}
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_compress_smollm2(tiny_llama, tmp_path):
    small = ["--window", 64, "--windows", 3, "--turns", 2, "--steps", 2, "--new-tokens", 4]
    output = run("compress_smollm2.py", "--model", tiny_llama, "--output", "out", *small, cwd=tmp_path)
    assert "189 tokens scored, bfloat16" in output
    for line in ("weights on disk, MB", "perplexity", "decode, tokens/s"):
        assert f"\n{line}" in output
    assert output.rstrip().endswith(f"Checkpoint: {tmp_path / 'out'}")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "out").iterdir()}


def test_compress_smollm2_names_its_baseline(smollm2, tmp_path):
    small = ["--window", 64, "--windows", 2, "--turns", 1, "--steps", 2]
    output = run("compress_smollm2.py", *small, cwd=tmp_path)
    assert "dequantised Q4_1, permuted" in output
    assert "capital of France is Paris" in output


@pytest.mark.parametrize("bits", ["4", "ternary"])
def test_load_save_reload(tiny_llama, tmp_path, bits):
    output = run("load_save_reload.py", tiny_llama, "--bits", bits, "--output", "out", cwd=tmp_path)
    assert "logits after reloading are bit-equal" in output


def test_quantize_in_memory(tmp_path):
    output = run("quantize_in_memory.py", "--hidden-size", 64, cwd=tmp_path)
    assert "3 bits" in output and "8 bits" in output
    change = float(output.rsplit(" ", 1)[1])
    assert 0 < change < 0.5


def test_encoder_similarity(minilm, tmp_path):
    output = run("encoder_similarity.py", cwd=tmp_path)
    dense, lowbit = map(float, output.split("4 bits\n", 1)[1].split()[:2])
    # 0.755 is what the model's authors print for this pair
    assert dense == pytest.approx(0.755, abs=0.001)
    assert lowbit == pytest.approx(dense, abs=0.1)


def test_report_and_codes(tiny_llama, tmp_path):
    # 64 columns in groups of 48: the last group of a row is shorter
    output = run("report_and_codes.py", tiny_llama, "--bits", 2, "--group-size", 48, cwd=tmp_path)
    assert "codes (64, 64) from -2 to 1" in output
    assert "equals the dequantized weight" in output


def test_push_to_hub(tiny_llama, hub, tmp_path):
    output = run(
        "push_to_hub.py", tiny_llama, "tiny-4bit", cwd=tmp_path, **{**hub.environment(), "HF_HUB_OFFLINE": "0"}
    )
    assert "pushed to me/tiny-4bit" in output
    assert "4 bits, groups of 64" in output.split("loaded from there:")[1]


def test_train_from_scratch(tmp_path):
    output = run("train_from_scratch.py", "--steps", 40, "--hidden-size", 32, "--layers", 2, cwd=tmp_path)
    before, after = (float(word) for word in output.split("a byte: ")[1].replace(" before,", "").split()[:2])
    assert after < before - 1
    assert "equal" in output and "'dqt/changed_rate'" in output
    sizes = [float(line.split()[2]) for line in output.splitlines() if " checkpoint " in line]
    assert sizes[1] < sizes[0]


def test_finetune_smollm2(tiny_llama, tmp_path):
    small = ["--steps", 6, "--context", 32, "--eval-windows", 4, "--learning-rate", 3e-3, "--output", "out"]
    output = run("finetune_smollm2.py", "--model", tiny_llama, *small, cwd=tmp_path)
    before, after = (float(word) for word in output.split("a token: ")[1].replace(" before,", "").split()[:2])
    assert after < before
    assert f"reloaded: {after:.3f}" in output
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "out").iterdir()}


def test_qlora_smollm2(tiny_llama, tmp_path):
    small = ["--window", 32, "--windows", 4, "--steps", 2]
    output = run("qlora_smollm2.py", "--model", tiny_llama, "--output", "out", *small, cwd=tmp_path)
    assert "loss with the adapter beside the codes" in output
    assert "loss with it merged exactly" in output
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("bits", [None, "8"])
def test_blast_smollm2(tiny_llama, tmp_path, bits):
    small = ["--steps", 12, "--context", 32, "--eval-windows", 4, "--block-size", 8, "--output", "out"]
    small += ["--bits", bits] if bits else []
    output = run("blast_smollm2.py", "--model", tiny_llama, *small, cwd=tmp_path)
    assert "50.00% of their blocks dead" in output and "logits are bit-equal" in output
    sizes = output.split("weights in memory: ")[1].split()
    assert float(sizes[3]) < float(sizes[0])
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "out").iterdir()}


def test_tour(tiny_llama, tmp_path):
    small = ["--window", 32, "--steps", 2, "--new-tokens", 2, "--calibration", 2000, "--output", "out"]
    output = run("tour.py", "--model", tiny_llama, *small, cwd=tmp_path)
    assert "pushed to http://127.0.0.1" in output and "me/tour-adapter" in output
    assert "4 bits, groups of" in output
    difference = float(output.split("model that was trained: ")[1].split()[0])
    assert difference == 0
    assert output.count("> What is the capital") == 2


def test_every_example_is_tested():
    tested = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tested] == []
