"""What every benchmark writes beside its figures: the machine, the versions, the protocol, and how quiet it was.

A figure without its conditions cannot be checked. So one place collects them, and one file format holds them:

    benchmarks/results/<name>.json
        benchmark   the name
        protocol    everything that the figures depend on and that the benchmark chose: data, windows, seeds, dtype
        machine     processor, instruction sets, cores, memory
        versions    python, torch, transformers, hf_lowbit
        sessions    one entry a run: when, how long, commit, threads, processor time taken by others, memory stream
        rows        key -> figures; a key that is there is not measured again

A run continues a file only when protocol, machine and versions agree; otherwise it asks for --restart, because a
table that mixes conditions misleads. Where no figure that is compared is a time (`timed=False`: losses, bytes),
another machine may continue: its rows name their processor, `cpu`.

Speed needs two more facts. `others` is the number of cores that other processes (and, on a virtual machine, its
neighbours) used meanwhile. `stream` is the rate at which one thread multiplies a vector by 300 MB of bfloat16
weights: the bound of batch-1 decoding, and low when memory is busy. `is_quiet` judges both.
"""

import json
import os
import platform
import statistics
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


RESULTS = Path(__file__).with_name("results")
ROOT = RESULTS.parents[1]

# instruction sets that decide which kernel runs, best last
INSTRUCTION_SETS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")

# below this a processor with bfloat16 instructions was busy; idle ones reach 8 to 14
STREAM_GB_PER_S = 6.0
# a spare kernel thread is noise, half a core is a competitor
OTHERS_CORES = 0.3


def cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set())


def machine() -> dict:
    """The hardware, without anything that identifies the host."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    flags = cpu_flags()
    return {
        "cpu": name,
        "instruction_sets": [isa for isa in INSTRUCTION_SETS if isa in flags],
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str | None:
    """The short commit of the working tree, with "+" when it holds changes; None outside git."""
    try:
        git = ["git", "-C", str(ROOT)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        # results are what a benchmark writes: they do not make the code another one
        status = [*git, "status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed else "")


def versions() -> dict:
    import transformers

    import hf_lowbit

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_lowbit": hf_lowbit.__version__,
    }


def stream_gb_per_s(megabytes: int = 300, repeats: int = 3) -> float:
    """Weight bytes per second and thread of batch-1 bfloat16 linear layers whose weights do not fit in cache."""
    width = 2048
    count = max(1, megabytes * 1_000_000 // (2 * width * width))
    weights = [torch.randn(width, width).bfloat16() for _ in range(count)]
    x = torch.randn(1, width).bfloat16()
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(x, weight)
        seconds.append(time.perf_counter() - begin)
    # the first pass also chose a kernel
    return count * 2 * width * width / statistics.median(seconds[1:]) / 1e9 / torch.get_num_threads()


def machine_seconds() -> float | None:
    """Processor seconds that the whole machine has spent so far, time stolen by its host included; None off Linux."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass
class Watch:
    """How long a piece of work took, and who else used the processor meanwhile."""

    seconds: float = 0.0
    others: float | None = None  # cores


@contextmanager
def watch():
    """Time the block: `with watch() as spent: ...; spent.seconds`."""
    spent = Watch()
    begin, own, whole = time.perf_counter(), sum(os.times()[:4]), machine_seconds()
    try:
        yield spent
    finally:
        spent.seconds = time.perf_counter() - begin
        if whole is not None:
            others = (machine_seconds() - whole) - (sum(os.times()[:4]) - own)
            spent.others = max(0.0, others / spent.seconds)


def is_quiet(others: float | None, stream: float | None = None) -> bool:
    """Whether a timing may be kept. The stream counts only where bfloat16 has instructions and memory is the bound."""
    if others is not None and others > OTHERS_CORES:
        return False
    return stream is None or "avx512_bf16" not in cpu_flags() or stream >= STREAM_GB_PER_S


class Record:
    """One results file, written after every row, continued by the next run."""

    def __init__(self, name: str, protocol: dict, restart: bool = False, folder: Path = RESULTS, timed: bool = True):
        self.path = folder / f"{name}.json"
        # through JSON and back, so that it compares equal to what a file holds
        conditions = {"protocol": protocol, "machine": machine(), "versions": versions()}
        conditions = json.loads(json.dumps(conditions))
        self.content = {"benchmark": name, **conditions, "sessions": [], "rows": {}}
        started = time.strftime("%Y-%m-%d %H:%M")
        self.session = {"started": started, "commit": commit(), "threads": torch.get_num_threads()}
        self.begin = time.perf_counter()
        if restart or not self.path.exists():
            return
        found = json.loads(self.path.read_text())
        if not timed:
            conditions["machine"] = self.content["machine"] = found["machine"]
        for part, value in conditions.items():
            if found[part] != value:
                keys = sorted(key for key in {*value, *found[part]} if value.get(key) != found[part].get(key))
                raise SystemExit(
                    f"{self.path.name} was measured under another {part} ({', '.join(keys)} differ). "
                    "Continue it under the same conditions, or measure everything anew with --restart."
                )
        self.content.update(sessions=found["sessions"], rows=found["rows"])

    @property
    def rows(self) -> dict:
        return self.content["rows"]

    def add(self, key: str, figures: dict) -> None:
        # which code made a row, and where: a file may hold rows of several commits and processors
        cpu = machine()["cpu"]
        elsewhere = {} if cpu == self.content["machine"]["cpu"] else {"cpu": cpu}
        self.rows[key] = {**figures, "commit": self.session["commit"], **elsewhere}
        self.save()

    def drop(self, text: str) -> None:
        """Forget the rows whose key contains `text`: they will be measured again."""
        self.content["rows"] = {key: figures for key, figures in self.rows.items() if text not in key}

    def note(self, **facts) -> None:
        """Add facts about this run: quietness, seeds drawn, a remark."""
        self.session.update(facts)

    def save(self) -> None:
        self.session["seconds"] = round(time.perf_counter() - self.begin, 1)
        content = {**self.content, "sessions": [*self.content["sessions"], self.session]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(self.path)
