"""`make bench` runs every benchmark there is, and reports the ones that fail."""

from types import SimpleNamespace

from benchmarks import __main__ as bench


def test_every_script_that_measures_is_listed():
    # quality.py and its like are run as programs; what they share is not
    programs = {path.stem for path in bench.FOLDER.glob("*.py") if "ArgumentParser(" in path.read_text()}
    assert set(bench.NAMES) == programs - {"__main__", "render"}


def test_a_failure_does_not_stop_the_others(monkeypatch, capsys):
    monkeypatch.setattr(bench, "NAMES", ("first", "second"))
    ran = []
    codes = {"benchmarks.first": 1}

    def run(command, **_):
        ran.append(command[-1])
        return SimpleNamespace(returncode=codes.get(command[-1], 0))

    monkeypatch.setattr(bench.subprocess, "run", run)
    assert bench.run([]) == 1
    assert ran == [f"benchmarks.{name}" for name in ("first", "second", *bench.RENDERERS)]
    assert "failed: first" in capsys.readouterr().out


def test_tables_alone(monkeypatch):
    ran = []
    monkeypatch.setattr(bench.subprocess, "run", lambda command, **_: ran.append(command[-1]) or SimpleNamespace(
        returncode=0))  # fmt: skip
    assert bench.run(["--tables"]) == 0
    assert ran == [f"benchmarks.{name}" for name in bench.RENDERERS]
    # everything that writes a page is among them
    writers = {path.stem for path in bench.FOLDER.glob("*.py") if "def write(folder: Path" in path.read_text()}
    assert set(bench.RENDERERS) == writers


def test_unknown_names_are_refused(capsys):
    assert bench.run(["quantum"]) == 2
    assert f"unknown benchmark 'quantum'; known: {', '.join(bench.NAMES)}." in capsys.readouterr().out
