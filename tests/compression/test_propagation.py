"""Error propagation against least squares, and the share that is chosen by tokens that the correction has not seen."""

import pytest
import torch

from hf_lowbit.compression.propagation import Propagation, correct
from hf_lowbit.compression.statistics import Accumulator


SIZE, TOKENS = 8, 400


def inputs(drift, batches=4, tokens=TOKENS):
    """Sums over batches of Xq, and of X = drift(Xq); also the whole of both."""
    generator = torch.Generator().manual_seed(0)
    sums, seen, dense = Accumulator(), [], []
    for _ in range(batches):
        xq = torch.randn(1, tokens // batches, SIZE, generator=generator)
        x = drift(xq, generator)
        sums.add({"layer": [xq]}, {"layer": [x]}, {})
        seen.append(xq[0])
        dense.append(x[0])
    return sums.groups()[0], torch.cat(seen), torch.cat(dense)


WEIGHT = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1))
MIX = torch.eye(SIZE) + 0.3 * torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(2))


def real(xq, generator):
    return xq @ MIX


def noise(xq, generator):
    return xq + torch.randn(xq.shape, generator=generator)


def test_the_whole_correction_is_least_squares():
    found, xq, x = inputs(noise)
    wanted = torch.linalg.lstsq(xq, x @ WEIGHT.t()).solution.t()
    moved, share = correct(WEIGHT, found, Propagation(1.0, 1e-6))
    torch.testing.assert_close(moved, wanted, rtol=1e-3, atol=1e-3)
    assert share == 1.0
    half, _ = correct(WEIGHT, found, Propagation(0.5, 1e-6))
    torch.testing.assert_close(half, (WEIGHT + wanted) / 2, rtol=1e-3, atol=1e-3)


def test_the_share_is_that_of_a_grid_search_on_the_other_half():
    found, *_ = inputs(lambda xq, g: real(xq, g) + 2 * torch.randn(xq.shape, generator=g), tokens=64)
    _, share = correct(WEIGHT, found, Propagation(None, 0.01))
    halves = [(found.half_hessian, found.half_drift),
              (found.hessian - found.half_hessian, found.drift - found.half_drift)]  # fmt: skip

    def unseen(a):
        total = 0.0
        for (h, c), (h_other, c_other) in (halves, halves[::-1]):
            damped = h + 0.01 * h.diagonal().mean() * torch.eye(SIZE)
            d = a * torch.linalg.solve(damped, (WEIGHT @ c).t()).t()
            total += float((d @ h_other * d).sum() - 2 * (WEIGHT @ c_other * d).sum())
        return total

    grid = [i / 1000 for i in range(1001)]
    assert 0.05 < share < 0.95
    assert abs(min(grid, key=unseen) - share) <= 0.001


def test_what_holds_everywhere_is_taken_and_noise_is_not():
    assert correct(WEIGHT, inputs(real)[0], Propagation())[1] > 0.9
    assert correct(WEIGHT, inputs(noise, tokens=40)[0], Propagation())[1] < 0.5


def test_without_drift_or_a_factor_the_weight_stays():
    found, *_ = inputs(lambda xq, g: xq.clone())
    assert correct(WEIGHT, found, Propagation())[1] == 0.0
    found.drift = None
    assert correct(WEIGHT, found, Propagation(0.5)) == (WEIGHT, 0.0)
    found, *_ = inputs(real)
    found.hessian.fill_(-1.0)
    assert correct(WEIGHT, found, Propagation(0.5))[0] is WEIGHT


@pytest.mark.parametrize(
    "fields", [{"share": 0}, {"share": 1.5}, {"share": -1}, {"damping": 0}, {"damping": float("nan")}]
)
def test_settings_that_make_no_sense(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Propagation(**fields)
