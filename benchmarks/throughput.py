"""How long a machine takes to train several models at once: the throughput metric of MLPerf HPC.

    python -m benchmarks.throughput --instances 2

Every instance is a run of `benchmarks/time_to_quality.py` in a process of its own, with a seed of its own, all at the
same time:

    TTT_a = max(run_stop) - min(run_start)      over the M' instances that reached the target

(hpc_training_rules.adoc). Of instances with equal seeds one counts, since the others did the same work; those that did
not arrive are pruned; nothing is extrapolated from M' to M. Reported are M, M', TTT_a and models an hour.

Writes benchmarks/results/throughput.json from a machine without other work: these are seconds.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.record import ROOT, Record, is_quiet, watch
from benchmarks.time_to_quality import BENCHMARK, STEPS, TARGET, WAYS
from hf_lowbit.training.mllog import read_log, read_result


@dataclass(frozen=True)
class Throughput:
    """What the logs of simultaneous runs say together. `seconds` is None when no instance arrived."""

    instances: int
    counted: int
    seconds: float | None

    @property
    def models_an_hour(self) -> float:
        return 3600 * self.counted / self.seconds if self.seconds else 0.0


def throughput(logs: list[Path]) -> Throughput:
    """The metric, from one log an instance. ValueError for runs of different benchmarks."""
    events = [{event.key: event for event in read_log(log)} for log in logs]
    names = sorted({event["submission_benchmark"].value for event in events})
    if len(names) != 1:
        raise ValueError(f"the logs are of {len(names)} benchmarks ({', '.join(names)}); give those of one.")
    counted = {}
    for log, event in zip(logs, events, strict=True):
        if read_result(log).reached:
            counted.setdefault(event["seed"].value, event)
    if not counted:
        return Throughput(len(logs), 0, None)
    last = max(event["run_stop"].time_ms for event in counted.values())
    first = min(event["run_start"].time_ms for event in counted.values())
    return Throughput(len(logs), len(counted), (last - first) / 1000)


def run(method: str, instances: int, folder: Path) -> Throughput:
    """Train `instances` models at once."""
    logs = [folder / f"result_{seed}.txt" for seed in range(instances)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.time_to_quality", "--one", method, str(seed), str(log)], cwd=ROOT,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for seed, log in enumerate(logs)
    ]  # fmt: skip
    errors = [process.communicate()[1] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(errors))
    return throughput(logs)


def main(arguments) -> int:
    protocol = {"benchmark": BENCHMARK, "target": TARGET, "steps": STEPS, "ways": WAYS}
    record = Record("throughput", protocol, arguments.restart)
    methods = arguments.method or ["fp32", "dqt-8"]
    print(f"{len(methods)} methods, {arguments.instances} instances each at the same time; a minute or two each.")
    for method in methods:
        key = f"{method}/{arguments.instances}"
        if key not in record.rows:
            with watch() as spent, tempfile.TemporaryDirectory() as folder:
                found = run(method, arguments.instances, Path(folder))
            if not is_quiet(spent.others):
                print(f"{key}: thrown away, others used {spent.others:.1f} cores meanwhile.")
                continue
            figures = {**asdict(found), "models_an_hour": round(found.models_an_hour, 2), "others": spent.others}
            record.add(key, figures)
        row = record.rows[key]
        print(f"{key}: {row['counted']} of {row['instances']} arrived, {row['seconds']} s, "
              f"{row['models_an_hour']} models an hour")  # fmt: skip
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--method", action="append", choices=list(WAYS), help="default: fp32 and dqt-8")
    sys.exit(main(parser.parse_args()))
