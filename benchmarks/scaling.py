"""Strong and weak scaling of data-parallel training over gloo, bucket sizes, bfloat16 gradients, and a model of time.

    python -m benchmarks.scaling                 # continues where the last run stopped, 20 minutes at most
    python -m benchmarks.scaling --processes 2

Measured, each in fresh processes with one thread: the seconds of a step without communication by samples a process, of
all-reduces by bytes, and of whole steps: strong scaling (a global batch of 16), weak scaling (8 a process), buckets of
1, 4 and 25 MB with float32 and bfloat16 gradients, for float32 and 8-bit weights; after the steps, whether all
replicas are equal.
`benchmarks/time_model.py` is fitted to the first two and printed with its error on the third; its constants
serve to extrapolate to another cluster. A measurement during which the machine was busy is thrown away.

Writes benchmarks/results/scaling.json.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

from benchmarks.record import ROOT, Record, is_quiet, watch
from benchmarks.time_model import Constants, errors, fit, fit_overlap, step, total


SIZE, METHODS = "1M", ("fp32", "dqt-8")
SAMPLES, BYTES = (2, 4, 8, 16), (1 << 16, 1 << 20, 1 << 22, 1 << 24)
STRONG, WEAK = 16, 8
BUCKETS, HOOKS = (1, 4, 25), ("fp32", "bf16")
REPEATS = 9
# PyTorch's own
DEFAULT = {"bucket_mb": 25, "hook": "fp32"}


def jobs(processes: int) -> dict[str, dict]:
    """key -> job, for worlds of 1, 2, 4, ... up to `processes`."""
    worlds = [1 << power for power in range(processes.bit_length()) if 1 << power <= processes]
    found = {f"compute/{m}": {"kind": "compute", "method": m, "samples": SAMPLES, "world": 1} for m in METHODS}
    for world in worlds[1:]:
        found[f"reduces/{world}"] = {"kind": "reduces", "bytes": BYTES, "world": world}
    for world in worlds:
        for method in METHODS:
            base = {"kind": "steps", "method": method, "world": world, **DEFAULT}
            found[f"strong/{method}/{world}"] = {**base, "samples": STRONG // world}
            found[f"weak/{method}/{world}"] = {**base, "samples": WEAK}
    for world in worlds[1:]:
        for bucket in BUCKETS:
            for hook in HOOKS:
                way = {"bucket_mb": bucket, "hook": hook, "samples": WEAK, "world": world}
                found[f"buckets/{world}/{bucket}/{hook}"] = {"kind": "steps", "method": "fp32", **way}
    return {key: {"size": SIZE, "repeats": REPEATS, **job} for key, job in found.items()}


def run(job: dict) -> dict:
    """Measure a job in as many fresh processes as it wants."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.scaling_worker"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(job["world"]), port, json.dumps(job)], cwd=ROOT,
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(job["world"])
    ]  # fmt: skip
    outputs = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(error for _, error in outputs))
    return json.loads(outputs[0][0].splitlines()[-1])


def points(rows: dict, method: str) -> list[tuple[float, float, int, int, float]]:
    """(seconds, batch, processes, buckets, share of gradient bytes) of the steps of a method."""
    found = []
    gradients = rows[f"compute/{method}"]["gradient_bytes"]
    for row in rows.values():
        job = row.get("job", {})
        if job.get("kind") == "steps" and job["method"] == method:
            buckets = -(-gradients // (job["bucket_mb"] << 20))
            share = 0.5 if job["hook"] == "bf16" else 1.0
            found.append((row["seconds"], job["samples"] * job["world"], job["world"], buckets, share))
    return found


def model_of(rows: dict, method: str) -> Constants:
    """Constants of one method, from what has been measured."""
    worlds = [int(key.rpartition("/")[2]) for key in rows if key.startswith("reduces/")]
    world = max(worlds, default=1)
    row = rows[f"compute/{method}"]
    computes = {int(samples): seconds for samples, seconds in row["seconds"].items()}
    reduced = rows[f"reduces/{world}"]["seconds"] if world > 1 else {}
    constants = fit(computes, {int(b): s for b, s in reduced.items()}, world, gradient_bytes=row["gradient_bytes"])
    return fit_overlap(constants, points(rows, method))


def summary(rows: dict) -> str:
    lines = []
    for method in METHODS:
        if f"compute/{method}" not in rows or not points(rows, method):
            continue
        constants, measured = model_of(rows, method), points(rows, method)
        wrong = [abs(error) for error in errors(constants, measured)]
        stored = rows[f"compute/{method}"]["stored_bytes"]
        lines.append(
            f"{method}: step = {1e3 * constants.fixed:.1f} ms + {1e3 * constants.per_sample:.2f} ms a sample; "
            f"{constants.gradient_bytes / 1e6:.1f} MB of gradients, {stored / 1e6:.1f} MB stored; overlap "
            f"{constants.overlap:.0%}; model error {statistics.fmean(wrong):.0%} mean, {max(wrong):.0%} worst of "
            f"{len(wrong)} steps"
        )
        for seconds, batch, processes, buckets, share in measured:
            lines.append(
                f"  batch {batch:4.0f}, {processes} processes, {buckets} buckets, {4 * share:.0f} bytes a gradient: "
                f"{1e3 * seconds:7.1f} ms, model {1e3 * step(constants, batch, processes, buckets, share):7.1f} ms"
            )
        if constants.bandwidth != float("inf"):
            for processes in (2, 8, 64):
                times = [total(constants, 8 * processes, processes, 100_000, gradient_share=s) for s in (1.0, 0.5)]
                lines.append(
                    f"  model, {processes} processes, 8 samples each, 100000 samples: {times[0]:.0f} s, with bfloat16 "
                    f"gradients {times[1]:.0f} s"
                )
    return "\n".join(lines)


def main(arguments) -> None:
    protocol = {
        "size": SIZE, "methods": METHODS, "samples": SAMPLES, "bytes": BYTES, "strong": STRONG, "weak": WEAK,
        "buckets": BUCKETS, "hooks": HOOKS, "repeats": REPEATS, "processes": arguments.processes,
        "backend": "gloo, one thread a process",
    }  # fmt: skip
    record = Record("scaling", protocol, arguments.restart)
    plan = jobs(arguments.processes)
    print(f"{len(plan)} measurements, of which {len(record.rows)} are done; about 20 seconds each.")
    deadline = time.monotonic() + 60 * arguments.minutes
    for key, job in plan.items():
        if key in record.rows:
            continue
        if time.monotonic() > deadline:
            print("time is up; run this again to continue.")
            break
        with watch() as spent:
            figures = run(job)
        if is_quiet(spent.others):
            record.add(key, {**figures, "job": job, "others": spent.others})
        else:
            print(f"{key}: thrown away, others used {spent.others:.1f} cores meanwhile.")
    print(summary(record.rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    main(parser.parse_args())
