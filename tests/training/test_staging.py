"""Staging: disjoint parts whose union is all, nothing copied twice, never half a file, damage seen."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_lowbit.training import staging
from hf_lowbit.training.staging import checksum, stage


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    for index in range(7):
        path = folder / f"part{index % 2}" / f"{index}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(1000 * index))
    return folder


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.bin")}


@pytest.mark.parametrize("world", [1, 2, 3, 9])
def test_parts_are_disjoint_and_together_all(source, tmp_path, world):
    results = [stage(source, tmp_path / "near", rank, world) for rank in range(world)]
    names = [name for result in results for name in result.files]
    assert len(names) == len(set(names)) == 7
    assert contents(tmp_path / "near") == contents(source)
    assert sum(result.bytes for result in results) == 21_000


@given(count=st.integers(1, 40), world=st.integers(1, 50))
@settings(max_examples=50, deadline=None)
def test_parts_of_any_number_of_files(count, world):
    pairs = list(range(count))
    parts = [pairs[rank::world] for rank in range(world)]
    assert sorted(item for part in parts for item in part) == pairs
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_second_call_copies_nothing_and_a_change_is_copied(source, tmp_path):
    first = stage(source, tmp_path / "near")
    again = stage(source, tmp_path / "near")
    assert (first.copied, again.copied, again.bytes, again.total_bytes) == (7, 0, 0, 21_000)
    (source / "part0" / "2.bin").write_bytes(b"other")
    os.remove(tmp_path / "near" / "part1" / "3.bin")
    third = stage(source, tmp_path / "near")
    assert third.copied == 2 and contents(tmp_path / "near") == contents(source)


def test_damage_of_the_same_size_is_found_by_verifying(source, tmp_path):
    stage(source, tmp_path / "near")
    target = tmp_path / "near" / "part0" / "4.bin"
    kept = target.stat()
    target.write_bytes(bytes(4000))
    os.utime(target, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert stage(source, tmp_path / "near").copied == 0
    assert stage(source, tmp_path / "near", verify=True).copied == 1
    assert contents(tmp_path / "near") == contents(source)


def test_an_interruption_leaves_no_half_file_and_is_continued(source, tmp_path, monkeypatch):
    replace = staging.Path.replace
    calls = []

    def interrupted(path, target):
        calls.append(target)
        if target.name == "4.bin":
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(staging.Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stage(source, tmp_path / "near")
    monkeypatch.undo()
    there = contents(tmp_path / "near")
    assert 0 < len(there) < 7 and all(contents(source)[name] == data for name, data in there.items())
    rest = stage(source, tmp_path / "near")
    assert rest.copied == 7 - len(there)
    assert contents(tmp_path / "near") == contents(source)


def test_what_is_measured(source, tmp_path):
    result = stage(source, tmp_path / "near")
    assert result.seconds > 0 and result.start_ms <= result.stop_ms
    assert result.gb_per_s == pytest.approx(result.bytes / result.seconds / 1e9)
    assert result.facts()["files"] == 7 and result.facts()["bytes"] == 21_000


def test_lists_of_files_and_checksums(source, tmp_path):
    files = sorted(source.rglob("*.bin"))
    assert stage(files, tmp_path / "near").files == tuple(f"{index}.bin" for index in range(7))
    for path in files:
        assert checksum(path) == checksum(tmp_path / "near" / path.name)
    assert stage(str(files[1]), tmp_path / "one").copied == 1


def test_datasets_are_staged_in_shards(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(23))})
    results = [stage(rows, tmp_path / "near", rank, 3) for rank in range(3)]
    found = [datasets.load_from_disk(str(tmp_path / "near" / result.files[0]))["x"] for result in results]
    assert sorted(x for part in found for x in part) == list(range(23))
    assert [stage(rows, tmp_path / "near", rank, 3).copied for rank in range(3)] == [0, 0, 0]
    with pytest.raises(ValueError, match="23 rows"):
        stage(rows, tmp_path / "near", 0, 24)


def test_bad_input(source, tmp_path):
    for rank, world in ((1, 1), (-1, 2), (0, 0), (0.0, 1)):
        with pytest.raises(ValueError, match="`rank`"):
            stage(source, tmp_path / "near", rank, world)
    with pytest.raises(FileNotFoundError, match="do not exist"):
        stage([source / "part0" / "0.bin", source / "none"], tmp_path / "near")
    assert not (tmp_path / "near").exists()
    with pytest.raises(ValueError, match="no files"):
        stage([], tmp_path / "near")
    with pytest.raises(ValueError, match="within the source"):
        stage(source, source / "near")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="one name"):
        stage([source / "part0" / "0.bin", tmp_path / "a" / "0.bin"], tmp_path / "near")
