"""`optimum-cli lowbit` has the commands of `hf-lowbit`, and optimum's interface of a quantizer compresses."""

import pytest
from transformers import AutoModelForCausalLM

import hf_lowbit as lb
from hf_lowbit.cli import COMMANDS
from tests.assets import tiny_llama  # noqa: F401


pytest.importorskip("optimum.commands")


@pytest.fixture
def optimum_cli(monkeypatch):
    """optimum-cli itself, in this process."""
    from optimum.commands.optimum_cli import main

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["optimum-cli", *map(str, arguments)])
        main()

    return call


def test_every_command_is_there(optimum_cli, capsys):
    with pytest.raises(SystemExit):
        optimum_cli("lowbit", "--help")
    printed = capsys.readouterr().out
    assert all(f"    {name} " in printed for name in COMMANDS)


def test_it_is_registered_once():
    from optimum.commands.optimum_cli import _OPTIMUM_CLI_SUBCOMMANDS as commands

    from hf_lowbit.registration import register_optimum

    register_optimum()
    assert [command.COMMAND.name for command, _ in commands].count("lowbit") == 1


def test_a_command_runs_and_a_refusal_is_one_sentence(optimum_cli, tiny_llama, tmp_path, capsys):  # noqa: F811
    optimum_cli("lowbit", "compress", tiny_llama, tmp_path / "out", "--bits", 4, "--low-memory", "--stages", "layer")
    assert "the checkpoint is in" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert "4 bits" in str(lb.report(model))
    with pytest.raises(SystemExit, match="1"):
        optimum_cli("lowbit", "export", tmp_path / "out", tmp_path / "other", "--format", "nothing")
    assert "optimum-cli lowbit export: `format`='nothing' is unknown" in capsys.readouterr().err


def test_the_quantizer_of_its_interface(tiny_llama, tmp_path):  # noqa: F811
    from optimum.quantization_base import OptimumQuantizer

    from hf_lowbit.pipeline.optimum import LowBitOptimumQuantizer

    quantizer = LowBitOptimumQuantizer.from_pretrained(tiny_llama)
    assert isinstance(quantizer, OptimumQuantizer)
    result = quantizer.quantize(tmp_path / "out", bits=8, stages=("layer",))
    assert result.report.bits_per_weight > 8 and (tmp_path / "out/model.safetensors").is_file()
    for field in ("file_name", "file_prefix"):
        with pytest.raises(ValueError, match=f"`{field}`='x'"):
            quantizer.from_pretrained(tiny_llama, "x") if field == "file_name" else quantizer.quantize(tmp_path, "x")
