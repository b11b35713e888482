"""Bringing the data near the processor before the clock starts, each process its own part.

MLPerf HPC (Farrell et al. 2021) found staging from a shared file system to node-local storage among the costs of large
runs, and logs it. `stage` copies, on rank r of w, the files number r, r + w, r + 2w, ... of the sorted list, so that
parts are disjoint and together are all:

    copy to a temporary name beside the target, with a checksum on the way -> flush -> rename -> note in the manifest

A file is either not there or whole. A second call copies only what is missing, changed in size or time at the source,
or gone at the target; `verify=True` reads the targets again to see damage that leaves size and time alone. What is
measured is returned, and logged by `MLPerfCallback(staging=...)`.

A data set (`datasets.Dataset`) is staged as this rank's shard, saved by `save_to_disk` and named by its fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from .mllog import now_ms


BLOCK = 1 << 22


@dataclass(frozen=True)
class Staged:
    """What a call of `stage` did on this rank."""

    files: tuple[str, ...]  # what lies at the target now, relative to it
    copied: int  # files copied by this call
    bytes: int  # bytes copied by this call
    total_bytes: int  # bytes of all of this rank's files
    seconds: float
    start_ms: int
    stop_ms: int
    rank: int
    world: int

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes copied a second."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    def facts(self) -> dict:
        """For a log."""
        kept = {k: v for k, v in asdict(self).items() if k not in ("files", "start_ms", "stop_ms")}
        return {**kept, "files": len(self.files), "gb_per_s": round(self.gb_per_s, 4)}


def stage(source, destination: str | Path, rank: int = 0, world: int = 1, verify: bool = False) -> Staged:
    """Copy this rank's part of `source` to `destination`.

    Args:
        source: a folder (all files below it, by relative path), a list of files (by name), or a `datasets.Dataset`.
        destination: a folder; made when it is missing.
        rank, world: which part, of how many.
        verify: read what is there already and compare checksums (default: sizes and times).

    Returns:
        `Staged`: files, bytes, seconds, GB/s of this call.

    Raises:
        ValueError: for ranks out of range, two files of one name, an empty source, a folder within itself.
        FileNotFoundError: for files that do not exist, before anything is copied. OSError: when a copy differs.
    """
    if not (isinstance(world, int) and isinstance(rank, int) and 0 <= rank < world):
        raise ValueError(f"`rank`={rank!r} must be at least 0 and below `world`={world!r}.")
    destination = Path(destination)
    begin, start = time.perf_counter(), now_ms()
    if hasattr(source, "save_to_disk"):
        names, copied, size, total = _stage_dataset(source, destination, rank, world)
    else:
        pairs = _pairs(source, destination)
        names, copied, size, total = _stage_files(pairs[rank::world], destination, rank, world, verify)
    spent = time.perf_counter() - begin
    return Staged(tuple(names), copied, size, total, spent, start, now_ms(), rank, world)


def checksum(path: str | Path) -> str:
    """BLAKE2b-128 of a file."""
    total = hashlib.blake2b(digest_size=16)
    with Path(path).open("rb") as stream:
        while block := stream.read(BLOCK):
            total.update(block)
    return total.hexdigest()


def _pairs(source, destination: Path) -> list[tuple[Path, str]]:
    """(file, name at the target), sorted by name."""
    if isinstance(source, (str, os.PathLike)) and Path(source).is_dir():
        root = Path(source)
        if destination.resolve().is_relative_to(root.resolve()):
            raise ValueError(f"`destination`={str(destination)!r} lies within the source; stage to another folder.")
        found = [(path, path.relative_to(root).as_posix()) for path in root.rglob("*") if path.is_file()]
    else:
        given: Iterable = [source] if isinstance(source, (str, os.PathLike)) else source
        found = [(Path(path), Path(path).name) for path in given]
    missing = [str(path) for path, _ in found if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"{len(missing)} files to stage do not exist, the first is {missing[0]!r}.")
    if not found:
        raise ValueError("`source` has no files.")
    found.sort(key=lambda pair: pair[1])
    for (one, name), (other, next_name) in zip(found, found[1:], strict=False):
        if name == next_name:
            raise ValueError(f"{str(one)!r} and {str(other)!r} have one name; stage their folder, or rename one.")
    return found


def _stage_files(pairs, destination: Path, rank: int, world: int, verify: bool) -> tuple[list[str], int, int, int]:
    destination.mkdir(parents=True, exist_ok=True)
    manifest = destination / f"manifest-{rank}-of-{world}.json"
    known = json.loads(manifest.read_text()) if manifest.exists() else {}
    copied = size = total = 0
    for source, name in pairs:
        target, stat = destination / name, source.stat()
        state = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        total += stat.st_size
        if _is_staged(target, known.get(name), state, verify):
            continue
        known[name] = {**state, "blake2b": _copy(source, target, rank)}
        copied, size = copied + 1, size + stat.st_size
        _replace(manifest, json.dumps(known, indent=1), rank)
    return [name for _, name in pairs], copied, size, total


def _is_staged(target: Path, note: dict | None, state: dict, verify: bool) -> bool:
    if note is None or {k: note[k] for k in state} != state or not target.is_file():
        return False
    if target.stat().st_size != state["bytes"]:
        return False
    return not verify or checksum(target) == note["blake2b"]


def _copy(source: Path, target: Path, rank: int) -> str:
    """Copy by way of a temporary file; the checksum of what was read. Compares what was written with it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{rank}.part")
    total, size = hashlib.blake2b(digest_size=16), 0
    with source.open("rb") as reader, temporary.open("wb") as writer:
        while block := reader.read(BLOCK):
            total.update(block)
            size += writer.write(block)
        writer.flush()
        os.fsync(writer.fileno())
    if temporary.stat().st_size != size:
        raise OSError(f"{str(target)!r}: {temporary.stat().st_size} bytes arrived of {size}; is the disk full?")
    temporary.replace(target)
    return total.hexdigest()


def _replace(path: Path, text: str, rank: int) -> None:
    temporary = path.with_name(f".{path.name}.{rank}.part")
    temporary.write_text(text)
    temporary.replace(path)


def _stage_dataset(dataset, destination: Path, rank: int, world: int) -> tuple[list[str], int, int, int]:
    if len(dataset) < world:
        raise ValueError(f"`source` has {len(dataset)} rows for `world`={world} ranks; use fewer.")
    name = f"{dataset._fingerprint}-{rank}-of-{world}"
    target = destination / name
    copied = size = 0
    if not target.exists():
        temporary = destination / f".{name}.part"
        shutil.rmtree(temporary, ignore_errors=True)
        dataset.shard(num_shards=world, index=rank, contiguous=True).save_to_disk(str(temporary))
        temporary.rename(target)
        copied = 1
    total = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return [name], copied, total if copied else size, total
