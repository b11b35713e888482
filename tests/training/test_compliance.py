"""The official checker's verdict on our logs: it passes them, and fails them when any required line is missing."""

import json
import subprocess
import sys

import pytest
import yaml

import hf_lowbit as lb
from hf_lowbit.training.compliance import RULESET, check_log, derive_rules, official_rules
from hf_lowbit.training.staging import stage
from tests.training.countings import TARGET, run


pytest.importorskip("mlperf_logging")
# a benchmark of MLPerf's own, for conformance only: results are never labelled so
OFFICIAL = "llama31_8b"
CHECK_ALL = """
import sys, logging, json
from mlperf_logging.compliance_checker import mlp_compliance as c
logging.disable(logging.CRITICAL)
verdicts = {}
for path in sys.argv[3:]:
    c.enqueued_configs.clear()
    checker = c.make_checker("training", sys.argv[1], False, True)
    verdicts[path] = c.main(path, sys.argv[2], checker)[0]
print(json.dumps(verdicts))
"""


def check_all(rules, paths):
    """Many logs in one process: what the command line does, without its start."""
    command = [sys.executable, "-c", CHECK_ALL, RULESET, str(rules), *map(str, paths)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return list(json.loads(result.stdout.splitlines()[-1]).values())


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Benchmark name -> log of a real run."""
    folder = tmp_path_factory.mktemp("logs")
    found = {}
    for name in ("hf_lowbit_counting", OFFICIAL):
        found[name] = folder / f"{name}.txt"
        (folder / "shard.bin").write_bytes(bytes(1000))
        staged = stage(folder / "shard.bin", folder / name)
        run(folder, lb.MLPerfCallback(found[name], name, TARGET, staging=staged))
    return found


def required_keys():
    """All that the official rules of an open run require, without alternatives."""
    keys = []
    for file in ("common.yaml", "open_common.yaml", f"open_{OFFICIAL}.yaml"):
        for record in yaml.load((official_rules() / file).read_text(), Loader=yaml.BaseLoader):
            if record.get("KEY", {}).get("REQ") in ("EXACTLY_ONE", "AT_LEAST_ONE"):
                keys.append(record["KEY"]["NAME"])
    return sorted(set(keys))


def test_the_official_rules_pass_a_run_under_an_official_name(logs):
    verdict = check_log(logs[OFFICIAL])
    assert verdict.passed, verdict.output


def test_the_derived_rules_pass_a_run_of_our_own(logs, tmp_path):
    rules = derive_rules(tmp_path / "rules", "hf_lowbit_counting", TARGET)
    verdict = check_log(logs["hf_lowbit_counting"], rules)
    assert verdict.passed, verdict.output
    # the official rules do not know the name
    assert not check_log(logs["hf_lowbit_counting"]).passed


@pytest.mark.parametrize("name", ["hf_lowbit_counting", OFFICIAL])
def test_every_required_key_is_needed(logs, name, tmp_path):
    keys = required_keys()
    assert len(keys) > 20
    lines = logs[name].read_text().splitlines()
    pairs = {"block_start": "block", "eval_accuracy": "eval_accuracy"}
    paths = []
    for key in (*keys, *pairs):
        kept = [line for line in lines if f'"key": "{key}"' not in line]
        assert len(kept) < len(lines), key
        paths.append(tmp_path / f"{len(paths)}-{key}.txt")
        paths[-1].write_text("\n".join(kept) + "\n")
    rules = derive_rules(tmp_path / "rules", name, TARGET) if name != OFFICIAL else official_rules() / "common.yaml"
    whole = tmp_path / "whole.txt"
    whole.write_text("\n".join(lines) + "\n")
    assert check_all(rules, [whole, *paths]) == [True, *[False] * len(paths)]


def test_derived_rules_keep_every_official_key(tmp_path):
    derived = yaml.safe_load(derive_rules(tmp_path, "mine", 0.5, precisions=("ternary",)).read_text())
    official = yaml.load((official_rules() / "common.yaml").read_text(), Loader=yaml.BaseLoader)

    def keys(rules):
        return [(r["KEY"]["NAME"], r["KEY"].get("REQ")) for r in rules if "KEY" in r]

    assert keys(derived) == keys(official)


def test_the_rules_of_hpc_pass_a_run_with_staging(logs, tmp_path):
    path = logs["hf_lowbit_counting"]
    rules = derive_rules(tmp_path / "rules", "hf_lowbit_counting", TARGET, usage="hpc")
    verdict = check_log(path, rules, usage="hpc")
    assert verdict.passed, verdict.output
    # staging that ends without a beginning
    lines = [line for line in path.read_text().splitlines() if '"staging_start"' not in line]
    (tmp_path / "half").write_text("\n".join(lines) + "\n")
    assert not check_log(tmp_path / "half", rules, usage="hpc").passed


def test_seeds_are_those_of_one_run_each(logs, tmp_path):
    seeds = pytest.importorskip("mlperf_logging.package_checker.seed_checker")
    text = logs["hf_lowbit_counting"].read_text()
    paths = [tmp_path / f"result_{index}.txt" for index in range(3)]
    for path, seed in zip(paths, (1, 2, 1), strict=True):
        path.write_text(text.replace('"key": "seed", "value": 1', f'"key": "seed", "value": {seed}'))
    checker = seeds.SeedChecker(RULESET)
    assert checker.check_seeds([str(path) for path in paths[:2]])
    assert not checker.check_seeds([str(path) for path in paths])


def test_a_target_that_was_missed_fails_the_derived_rules(logs, tmp_path):
    path = logs["hf_lowbit_counting"]
    rules = [
        derive_rules(tmp_path / "a", "hf_lowbit_counting", 1e-6),
        derive_rules(tmp_path / "b", "hf_lowbit_counting"),
        derive_rules(tmp_path / "c", "another_benchmark"),
        derive_rules(tmp_path / "d", "hf_lowbit_counting", 1e-6, greater_is_better=True),
    ]
    assert [check_all(rule, [path])[0] for rule in rules] == [False, True, False, True]


def test_words_that_the_official_list_lacks(logs, tmp_path):
    log = tmp_path / "log"
    lines = logs["hf_lowbit_counting"].read_text()
    log.write_text(lines.replace('precision_in_linear", "value": "fp32"', 'precision_in_linear", "value": "ternary"'))
    plain = derive_rules(tmp_path / "plain", "hf_lowbit_counting", TARGET)
    wider = derive_rules(tmp_path / "wider", "hf_lowbit_counting", TARGET, precisions=("ternary",))
    assert [check_all(rules, [log])[0] for rules in (plain, wider)] == [False, True]
    assert check_all(wider, [logs["hf_lowbit_counting"]]) == [True]


def test_an_unknown_ruleset(logs):
    with pytest.raises(ValueError, match="`ruleset`='99.0.0'"):
        check_log(logs[OFFICIAL], ruleset="99.0.0")
    with pytest.raises(ValueError, match="`usage`='inference'"):
        check_log(logs[OFFICIAL], usage="inference")
