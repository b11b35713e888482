"""How sparse at which step, and when masks change."""

import pytest

from hf_lowbit.sparsity.schedule import Schedule


def test_cubic_formula():
    plan = Schedule(total=100, step_size=10, decay=20)
    assert plan.freeze == 80
    for i in range(81):
        assert plan.sparsity(i, 0.9) == pytest.approx(0.9 - 0.9 * (1 - i / 80) ** 3)
    assert plan.sparsity(80, 0.9) == plan.sparsity(100, 0.9) == 0.9


def test_it_never_falls_and_starts_where_it_is_told():
    for shape in ("cubic", "linear"):
        plan = Schedule(total=40, shape=shape, initial=0.3)
        values = [plan.sparsity(i, 0.9) for i in range(41)]
        assert values[0] == pytest.approx(0.3) and values == sorted(values) and values[-1] == 0.9


def test_a_layer_with_a_lower_target_than_the_start_is_never_above_it():
    plan = Schedule(total=40, initial=0.5)
    assert {plan.sparsity(i, 0.2) for i in range(41)} == {0.2}


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        pytest.param(Schedule(20, 5, 0.25), [5, 10, 15], id="freeze-at-an-update"),
        pytest.param(Schedule(20, 6, 0.25), [6, 12, 15], id="freeze-between"),
        pytest.param(Schedule(20, 100, 0.25), [15], id="step-size-beyond"),
        pytest.param(Schedule(20, 7, 0), [7, 14, 20], id="no-tail"),
        pytest.param(Schedule(3, 1, 50), [1], id="tail-longer-than-all"),
    ],
)
def test_updates(plan, steps):
    assert [i for i in range(1, plan.total + 1) if plan.updates(i)] == steps


def test_growth_falls_to_nothing():
    plan = Schedule(100, decay=0.25, grow_fraction=0.4)
    shares = [plan.grown(i) for i in range(76)]
    assert shares[0] == pytest.approx(0.4) and shares == sorted(shares, reverse=True) and shares[75] == 0
