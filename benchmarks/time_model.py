"""Where the time of a data-parallel run goes, as a formula whose constants are measured.

    T = staging + steps (compute + exposed communication + exposed I/O) + evaluations
    staging     data bytes / (P storage bandwidth)                    each of P processes its own part
    steps       samples(B) / B                                        samples to the target at batch B: measured
    compute     a + c b,  b = B / P                                   a step's forward, backward, update
    all-reduce  2 (P - 1) (L k + n / (P W))                           ring: k buckets, n bytes, latency L, W bytes/s
    exposed     max(0, all-reduce - o c b)                            o: share of compute that overlaps it
    I/O         max(0, b bytes a sample / read bandwidth - compute)   the next batch is read meanwhile

(Farrell et al. 2021, *MLPerf HPC*, analyse staging, convergence and compute together; Yamazaki et al. 2019 send
several MB at a time and overlap them with the backward pass.) What bits change: n is gradients times their bytes,
which direct training leaves in the parameters' float dtype, so that a bfloat16 hook halves it and low-bit weights do
not; weights that travel (the first broadcast, sharded parameters, checkpoints) are packed bytes.
"""

from dataclasses import asdict, dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Constants:
    """What is measured on a machine with a model. Seconds, bytes, bytes a second."""

    fixed: float  # a
    per_sample: float  # c
    latency: float  # L
    bandwidth: float  # W
    overlap: float = 0.0  # o
    gradient_bytes: float = 0.0  # n
    sample_bytes: float = 0.0
    read_bandwidth: float = float("inf")
    storage_bandwidth: float = float("inf")
    evaluation: float = 0.0


def compute(constants: Constants, samples: float) -> float:
    """Seconds of one step of `samples` samples on one process, without communication."""
    return constants.fixed + constants.per_sample * samples


def all_reduce(constants: Constants, size: float, processes: int, buckets: int = 1) -> float:
    """Seconds to sum `size` bytes over processes."""
    return 2 * (processes - 1) * (constants.latency * buckets + size / (processes * constants.bandwidth))


def step(constants: Constants, batch: float, processes: int, buckets: int = 1, gradient_share: float = 1.0) -> float:
    """Seconds of one step at global `batch`. `gradient_share`: of the gradients' bytes, 0.5 under a bfloat16 hook."""
    own = batch / processes
    work = compute(constants, own)
    traffic = all_reduce(constants, gradient_share * constants.gradient_bytes, processes, buckets)
    exposed = max(0.0, traffic - constants.overlap * constants.per_sample * own)
    reading = max(0.0, own * constants.sample_bytes / constants.read_bandwidth - work)
    return work + exposed + reading


def total(
    constants: Constants, batch: int, processes: int, samples: float, data_bytes: float = 0.0, evaluations: int = 0,
    buckets: int = 1, gradient_share: float = 1.0,
) -> float:  # fmt: skip
    """Seconds of a whole run that needs `samples` samples at this batch."""
    staging = data_bytes / (processes * constants.storage_bandwidth)
    steps = -(-samples // batch)
    seconds = steps * step(constants, batch, processes, buckets, gradient_share)
    return staging + seconds + evaluations * constants.evaluation


def fit(computes: dict[int, float], reduces: dict[int, float], processes: int, **others) -> Constants:
    """Constants from seconds by samples a process, and from seconds by bytes of all-reduces over `processes`.

    Least squares of relative errors, so that small sizes count as much as large ones; nothing gets below 0.
    """
    fixed, per_sample = _line(computes)
    constants = Constants(fixed, per_sample, 0.0, float("inf"), **others)
    if processes > 1 and reduces:
        start, slope = _line(reduces)
        rounds = 2 * (processes - 1)
        bandwidth = rounds / (processes * slope) if slope > 0 else float("inf")
        constants = replace(constants, latency=start / rounds, bandwidth=bandwidth)
    return constants


def fit_overlap(constants: Constants, measured: list[tuple[float, float, int, int, float]]) -> Constants:
    """`constants` with the share of overlap, from 0 to 1, that explains steps best.

    measured: (seconds, batch, processes, buckets, gradient_share) of whole steps.
    """
    tried = [replace(constants, overlap=share / 50) for share in range(51)]
    return min(tried, key=lambda c: sum((step(c, *way) / seconds - 1) ** 2 for seconds, *way in measured))


def errors(constants: Constants, measured: list[tuple[float, float, int, int, float]]) -> list[float]:
    """Relative error of the model at each measured step."""
    return [step(constants, *way) / seconds - 1 for seconds, *way in measured]


def as_dict(constants: Constants) -> dict:
    """For a record; infinite bandwidths are left out."""
    return {name: value for name, value in asdict(constants).items() if value != float("inf")}


def _line(points: dict[int, float]) -> tuple[float, float]:
    """(value at 0, slope) of a line through points x -> y."""
    if len(points) < 2:
        raise ValueError(f"a line needs two sizes at least, there are {len(points)}.")
    x, y = np.array(list(points), dtype=float), np.array(list(points.values()), dtype=float)
    scaled = np.stack([1 / y, x / y], axis=1)
    start, slope = np.linalg.lstsq(scaled, np.ones(len(x)), rcond=None)[0]
    if start < 0:
        start, slope = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    return float(start), max(float(slope), 0.0)
