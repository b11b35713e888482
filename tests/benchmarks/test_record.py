"""A results file: complete conditions, resumable, never a mix of conditions."""

import json

import pytest

from benchmarks import record
from benchmarks.record import Record, is_quiet, machine, watch


@pytest.fixture(autouse=True)
def fixed_versions(monkeypatch):
    monkeypatch.setattr(record, "versions", lambda: {"torch": "2.13.0"})


def test_rows_survive_a_restart_of_the_program(tmp_path):
    first = Record("toy", {"seed": 0, "sizes": (1, 2)}, folder=tmp_path)
    first.add("a", {"value": 1})
    second = Record("toy", {"seed": 0, "sizes": (1, 2)}, folder=tmp_path)
    assert second.rows["a"]["value"] == 1
    second.add("b", {"value": 2})
    content = json.loads((tmp_path / "toy.json").read_text())
    assert list(content["rows"]) == ["a", "b"]
    assert len(content["sessions"]) == 2
    assert {"benchmark", "protocol", "machine", "versions"} < set(content)


def test_another_protocol_does_not_continue_the_file(tmp_path):
    Record("toy", {"seed": 0}, folder=tmp_path).add("a", {})
    with pytest.raises(SystemExit, match=r"another protocol \(seed differ\)"):
        Record("toy", {"seed": 1}, folder=tmp_path)
    assert Record("toy", {"seed": 1}, restart=True, folder=tmp_path).rows == {}


def test_times_of_another_machine_do_not_continue_the_file_and_losses_do(tmp_path, monkeypatch):
    here = machine()
    Record("toy", {}, folder=tmp_path).add("here", {"loss": 2.0})
    monkeypatch.setattr(record, "machine", lambda: {**here, "cpu": "another"})
    with pytest.raises(SystemExit, match=r"another machine \(cpu differ\)"):
        Record("toy", {}, folder=tmp_path)
    losses = Record("toy", {}, folder=tmp_path, timed=False)
    losses.add("there", {"loss": 2.0})
    assert losses.content["machine"] == here
    assert "cpu" not in losses.rows["here"] and losses.rows["there"]["cpu"] == "another"


def test_dropped_rows_are_forgotten(tmp_path):
    Record("toy", {}, folder=tmp_path).add("a/rtn", {})
    record = Record("toy", {}, folder=tmp_path)
    record.add("a/absmax", {})
    record.drop("rtn")
    assert list(record.rows) == ["a/absmax"]


def test_machine_names_no_host():
    import platform

    assert platform.node() not in json.dumps(machine()).split('"')


def test_watch_times_the_block():
    with watch() as spent:
        sum(range(100_000))
    assert spent.seconds > 0


@pytest.mark.parametrize(
    ("others", "stream", "quiet"),
    [
        pytest.param(0.0, 12.0, True, id="idle"),
        pytest.param(0.9, 12.0, False, id="competitor"),
        pytest.param(0.0, 3.0, False, id="memory-busy"),
        pytest.param(None, None, True, id="unknown"),
    ],
)
def test_quiet(monkeypatch, others, stream, quiet):
    monkeypatch.setattr(record, "cpu_flags", lambda: {"avx512_bf16"})
    assert is_quiet(others, stream) is quiet


def test_a_processor_without_bfloat16_is_not_judged_by_its_stream(monkeypatch):
    monkeypatch.setattr(record, "cpu_flags", lambda: {"avx2"})
    assert is_quiet(0.0, 2.0)
