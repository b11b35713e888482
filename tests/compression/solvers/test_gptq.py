"""GPTQ against a short obvious reference, on every grid, and on Hessians that can't be factored.

Public reports: AutoGPTQ/AutoGPTQ#708, #572 and #196, vllm-project/llm-compressor#142, intel/neural-compressor#1965.
"""

import pytest
import torch

from hf_lowbit.compression.solvers.gptq import DAMPING, factorize, fit, solve
from hf_lowbit.configs import Scheme
from hf_lowbit.functional.grid import dequantize, expand_groups, grid_of
from hf_lowbit.functional.rounding import round_to_nearest


SCHEMES = [Scheme(bits, group) for bits in ("ternary", 2, 3, 4, 8) for group in (16, None, "tensor")]
# codes of the reference, in float64, may differ where a value lies halfway between two levels
SAME_CODES = 0.995


def relative_error(weight, found, scheme, hessian):
    difference = weight - dequantize(*found, scheme.block)
    return float((difference @ hessian * difference).sum() / (weight @ hessian * weight).sum())


@pytest.fixture(scope="module")
def problem():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 72, generator=generator) @ torch.randn(72, 72, generator=generator) / 8
    return torch.randn(40, 72, generator=generator), x.T @ x


def reference(weight, hessian, scheme):
    """One column at a time, all of H^-1 in every step (Frantar et al. 2022, eq. 2-3), float64."""
    grid, start = (
        grid_of(scheme.bits),
        round_to_nearest(weight, grid_of(scheme.bits), scheme.group_size, scheme.symmetric),
    )
    w, h = weight.double().clone(), hessian.double().clone()
    h.diagonal().add_(DAMPING * float(hessian.diagonal().mean()))
    columns = w.shape[1]
    scale = expand_groups(start.scale.double(), columns, scheme.block).expand(w.shape)
    zero = torch.zeros_like(scale)
    if start.zero_point is not None:
        zero = expand_groups(start.zero_point.double(), columns, scheme.block).expand(w.shape)
    codes, free = torch.zeros_like(w), list(torch.argsort(hessian.diagonal(), descending=True, stable=True))
    inverse = torch.linalg.inv(h)
    while free:
        j = free.pop(0)
        codes[:, j] = ((w[:, j] / scale[:, j]).round() + zero[:, j]).clamp(grid.qmin, grid.qmax)
        error = (w[:, j] - (codes[:, j] - zero[:, j]) * scale[:, j]) / inverse[j, j]
        w -= error[:, None] * inverse[j]
        inverse = inverse - inverse[:, j, None] * inverse[None, j] / inverse[j, j]
    return codes.to(torch.int8)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.bits}-{s.group_size}")
def test_codes_are_those_of_the_reference(problem, scheme):
    weight, hessian = problem
    before = weight.clone(), hessian.clone()
    found = solve([weight], hessian, [scheme], refine=False)[0]
    if found.note is None:
        same = (found.quantized.codes == reference(weight, hessian, scheme)).double().mean()
        assert same > SAME_CODES
    assert torch.equal(weight, before[0]) and torch.equal(hessian, before[1])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.bits}-{s.group_size}")
def test_never_worse_than_rounding_and_better_with_fitted_scales(problem, scheme):
    weight, hessian = problem
    rounded = round_to_nearest(weight, grid_of(scheme.bits), scheme.group_size, scheme.symmetric)
    plain = solve([weight], hessian, [scheme], refine=False)[0]
    fitted = solve([weight], hessian, [scheme])[0]
    assert fitted.error <= plain.error <= relative_error(weight, rounded, scheme, hessian)
    assert fitted.error < relative_error(weight, rounded, scheme, hessian)
    grid = grid_of(scheme.bits)
    assert grid.qmin <= int(fitted.quantized.codes.min()) and int(fitted.quantized.codes.max()) <= grid.qmax


def test_weights_with_one_input_are_solved_as_if_alone(problem):
    weight, hessian = problem
    schemes = [Scheme(3, 16), Scheme(4, 16), Scheme(2, None)]
    weights = [weight, weight[:8] * 2, weight[4:20]]
    together = solve(weights, hessian, schemes)
    for w, scheme, found in zip(weights, schemes, together, strict=True):
        alone = solve([w], hessian, [scheme])[0]
        # products of other shapes round differently in their last bits, which can tip a value between two levels
        assert found.error == pytest.approx(alone.error, rel=0.02)


@pytest.mark.parametrize("kind", ["few-samples", "dead-inputs", "all-zero", "indefinite", "nan", "huge", "tiny"])
def test_bad_hessians_give_finite_results(problem, kind):
    weight, hessian = problem
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 72, generator=generator)
    if kind == "dead-inputs":
        x = torch.randn(200, 72, generator=generator)
        x[:, ::3] = 0
    bad = x.T @ x
    if kind == "all-zero":
        bad = torch.zeros_like(bad)
    if kind == "huge":
        # U of inputs near 1e18 underflows in float32
        bad = x.T @ x * 1e36
    if kind == "tiny":
        bad = x.T @ x * 1e-36
    if kind == "indefinite":
        bad = hessian - 2 * float(torch.linalg.eigvalsh(hessian).max()) * torch.eye(72)
    if kind == "nan":
        bad = hessian.clone()
        bad[3, 3] = torch.nan
    scheme = Scheme(4, 16)
    found = solve([weight], bad, [scheme])[0]
    dense = dequantize(*found.quantized, scheme.block)
    assert bool(torch.isfinite(dense).all())
    if kind in ("indefinite", "nan"):
        assert "without data" in found.note
    if kind == "dead-inputs":
        # an input that never occurred says nothing about its weights: nearest codes
        rounded = dequantize(*round_to_nearest(weight, grid_of(4), 16, True), 16)
        assert (dense[:, ::3] - weight[:, ::3]).norm() < 1.2 * (rounded[:, ::3] - weight[:, ::3]).norm()


def test_factor_is_that_of_the_damped_hessian(problem):
    _, hessian = problem
    factor = factorize(hessian)
    damped = hessian + DAMPING * float(hessian.diagonal().mean()) * torch.eye(72)
    ordered = damped[factor.order][:, factor.order]
    made = factor.feedback * factor.pivots.square() @ factor.feedback.T
    torch.testing.assert_close(made, ordered, rtol=1e-4, atol=1e-4 * float(ordered.max()))
    assert torch.equal(factor.feedback, factor.feedback.triu())
    assert torch.equal(factor.feedback.diagonal(), torch.ones(72))


@pytest.mark.parametrize("scheme", [Scheme(3, 16), Scheme(4, None), Scheme(2, 48), Scheme(8, 16)], ids=str)
def test_errors_are_those_of_the_scales_that_are_kept(problem, scheme):
    weight, hessian = problem
    start = round_to_nearest(weight, grid_of(scheme.bits), scheme.group_size, scheme.symmetric)
    found = fit(weight, start, scheme, hessian, True)
    expected = relative_error(weight, found.quantized, scheme, hessian)
    assert float(found.errors.sum() / found.whole.sum()) == pytest.approx(expected, rel=1e-3)
    assert bool((found.quantized.scale != start.scale).any()) and torch.equal(found.quantized.codes, start.codes)


def test_nan_in_a_weight_is_refused(problem):
    weight, hessian = problem
    with pytest.raises(ValueError, match="NaN"):
        solve([weight * torch.nan], hessian, [Scheme(4, 16)])
