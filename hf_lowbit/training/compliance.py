"""The verdict of MLCommons' own checker on a log (package mlperf-logging, extra `mlperf`).

`check_log` runs `mlperf_logging.compliance_checker` on a file. Its rules know MLPerf's benchmarks by name and nothing
else, so for other names `derive_rules` writes a rule set that takes the official one as it is installed and replaces
two things: which file holds the rules of the benchmark (a target, instead of a list of names), and, when asked, words
for precisions that the official list lacks. Every key that the official rules require stays required.

The checker evaluates expressions in its rule files. Give it rules of your own only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import yaml


# usage -> its newest rules: those of MLPerf Training, and of MLPerf HPC, which know staging
RULESETS = {"training": "6.1.0", "hpc": "3.0.0"}
RULESET = RULESETS["training"]
# what `open_<benchmark>.yaml` is for MLPerf's own
BENCHMARK_RULES = """
- KEY:
    NAME:  submission_benchmark
    REQ:   EXACTLY_ONE
    CHECK: " v['value'] == '{benchmark}' "

- KEY:
    NAME:  eval_accuracy
    REQ:   AT_LEAST_ONE
    CHECK:
        - "'samples_count' in v['metadata']"
{target}"""


class Verdict(NamedTuple):
    """`passed`, and what the checker printed."""

    passed: bool
    output: str


def official_rules(ruleset: str | None = None, usage: str = "training") -> Path:
    """The folder of the installed checker's rules, by default the newest. Raises ImportError or ValueError."""
    if usage not in RULESETS:
        raise ValueError(f"`usage`={usage!r} must be one of {', '.join(RULESETS)}.")
    ruleset = ruleset or RULESETS[usage]
    spec = find_spec("mlperf_logging")
    if spec is None:
        raise ImportError("the checker is the package mlperf-logging: `pip install 'hf_lowbit[mlperf]'`.")
    checker = Path(spec.submodule_search_locations[0]) / "compliance_checker"
    folder = checker / f"{usage}_{ruleset}"
    if not (folder / "common.yaml").exists():
        known = sorted(path.name.removeprefix(f"{usage}_") for path in checker.glob(f"{usage}_?.?.?"))
        raise ValueError(f"`ruleset`={ruleset!r} is not in the installed mlperf-logging; it has {', '.join(known)}.")
    return folder


def derive_rules(
    folder: str | Path,
    benchmark: str,
    target: float | None = None,
    greater_is_better: bool = False,
    precisions: tuple[str, ...] = (),
    ruleset: str | None = None,
    usage: str = "training",
) -> Path:
    """Write rules for `benchmark` into `folder`: the official ones, with this benchmark's in place of theirs.

    Args:
        target: require one evaluation that reaches it; None requires an evaluation.
        precisions: words allowed beside the official ones, such as ("ternary",).
        ruleset, usage: of which rules, default the newest of MLPerf Training; usage "hpc" is MLPerf HPC.

    Returns:
        the file to give the checker.
    """
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rules = yaml.load((official_rules(ruleset, usage) / "common.yaml").read_text(), Loader=yaml.BaseLoader)
    own = folder / f"{benchmark}.yaml"
    replaced = 0
    for record in rules:
        key = record.get("KEY", {})
        if key.get("NAME") == "submission_division":
            minutes = "s['compile_time_mins'] = 240 if v['value'] == 'open' else 30"
            key["POST"] = f" enqueue_config({str(own)!r}); {minutes} "
            replaced += 1
        elif key.get("NAME", "").startswith("lowest_numerical_precision_in") and precisions:
            key["CHECK"] = f" ({key['CHECK'].strip()}) or v['value'] in {list(precisions)!r} "
    if replaced != 1:
        raise ValueError(
            f"rules {ruleset} have no `submission_division` to hang a benchmark on; use {RULESETS[usage]}."
        )
    compare = ">=" if greater_is_better else "<="
    wanted = "" if target is None else f"    ATLEAST_ONE_CHECK: \"v['value'] {compare} {float(target)!r}\"\n"
    own.write_text(BENCHMARK_RULES.format(benchmark=benchmark, target=wanted))
    common = folder / f"{benchmark}_common.yaml"
    common.write_text(yaml.safe_dump(rules, sort_keys=False, width=1000))
    return common


def check_log(
    path: str | Path, rules: str | Path | None = None, ruleset: str | None = None, usage: str = "training"
) -> Verdict:
    """The official checker's verdict, warnings counting as errors. `rules`: from `derive_rules`; None: the official
    ones, which know MLPerf's benchmarks only. `ruleset`, `usage`: as for `derive_rules`."""
    ruleset = ruleset or RULESETS.get(usage)
    official_rules(ruleset, usage)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", usage]
        command += ["--ruleset", ruleset, "--werror", "--log_output", str(Path(folder) / "checker.log")]
        command += ["--config", str(Path(rules).resolve())] if rules is not None else []
        result = subprocess.run([*command, str(Path(path).resolve())], capture_output=True, text=True)
    return Verdict(result.returncode == 0, result.stdout + result.stderr)
